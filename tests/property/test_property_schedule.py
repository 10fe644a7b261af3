"""Whatever happens to a recorded pool, a replay decides the same; and sees it if one decision was another.

# covers: C11, C2
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from miles_async.errors import ReplayDifference
from miles_async.ledger.schedule import Decisions, PoolFrame
from miles_async.runtime.files.run_directory import SCHEDULE_FILE
from miles_async.types import TrainBatch, TrainShard
from miles_async.wiring.replay import Replay, ReplayedBatch
from tests.property.recorded_run import RecordedRun, random_arguments

SEEDS = st.integers(0, 2**32 - 1)
FIELDS = TrainBatch.__struct_fields__


@contextmanager
def recorded(seed: int, events: int = 200) -> Iterator[RecordedRun]:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        run = RecordedRun(Path(directory) / "0", random_arguments(chance), chance)
        run.live(events)
        run.end()
        yield run


def assert_same(replayed: list[ReplayedBatch], made: list[tuple[TrainShard, ...]]) -> None:
    """To the last bit, and not by digests."""
    assert [_bytes(batch.shards) for batch in replayed] == [_bytes(shards) for shards in made]


def _bytes(shards: tuple[TrainShard, ...]) -> list[object]:
    return [
        (
            (shard.target_version, shard.loss_tokens),
            [
                [[np.asarray(getattr(batch, name)).tobytes() for name in FIELDS] for batch in step]
                for step in shard.optimizer_steps
            ],
        )
        for shard in shards
    ]


@settings(max_examples=40)
@given(SEEDS)
def test_a_replay_makes_the_same_batches(seed: int) -> None:
    with recorded(seed, 300) as run:
        replay = Replay.of_run(run.run_dir)
        assert_same(list(replay), run.made)
        assert replay.complete
        assert replay.frames == len(run.frames())


@settings(max_examples=30)
@given(SEEDS)
def test_a_resumed_run_is_replayed_from_its_own_schedule(seed: int) -> None:
    # covers: C9
    chance = random.Random(seed)
    arguments = random_arguments(chance)
    with tempfile.TemporaryDirectory() as directory:
        run, step = None, 0
        for number in range(3):
            run = RecordedRun(Path(directory) / str(number), arguments, chance, resumed=run)
            run.live(chance.randrange(150))
            run.die()
            replayed = list(Replay.of_run(run.run_dir))
            assert_same(replayed, run.made)
            assert [batch.step for batch in replayed] == list(range(step + 1, step + 1 + len(replayed)))
            if number:  # what the checkpoint brought along is a decision, too
                restored = run.frames()[0].decisions.restored
                assert restored.ended["trained"] == step * run.arguments.rollout.rollout_batch_size
            step = run.pool.snapshot().state.steps


@settings(max_examples=40)
@given(SEEDS, st.data())
def test_one_other_decision_is_found_where_it_was_taken(seed: int, data: st.DataObject) -> None:
    with recorded(seed) as run:
        frames = run.frames()
        number = data.draw(st.sampled_from([i for i, frame in enumerate(frames) if isinstance(frame, PoolFrame)]))
        frame = frames[number]
        assert isinstance(frame, PoolFrame)
        other = data.draw(st.sampled_from(others(frame.decisions)))
        frames[number] = msgspec.structs.replace(frame, decisions=other)
        run.overwrite(frames)
        with pytest.raises(ReplayDifference, match=rf"frame {number + 1}: after {type(frame.call).__name__.lower()}"):
            list(Replay.of_run(run.run_dir))


def test_random_runs_abort_attempts_and_samples() -> None:
    """Else the tests above say nothing about them."""
    taken: list[Decisions] = []
    for seed in range(40):
        with recorded(seed, 300) as run:
            taken += [frame.decisions for frame in run.frames() if isinstance(frame, PoolFrame)]
    aborted = [decisions for decisions in taken if decisions.aborted]
    assert any(decisions.ended for decisions in aborted)
    assert any(not decisions.ended for decisions in aborted)


def others(decisions: Decisions) -> list[Decisions]:
    """The same, but for one thing."""

    def changed(**fields: object) -> Decisions:
        return msgspec.structs.replace(decisions, **fields)

    found = [changed(room=decisions.room + 1), changed(error="DataError: boom")]
    if decisions.batch:
        found += [changed(batch=decisions.batch[::-1]), changed(batch=())]
    if decisions.ended:
        found += [changed(ended=decisions.ended[1:])]
        found += [changed(ended=[msgspec.structs.replace(decisions.ended[0], reason="why")])]
    if decisions.admitted:
        found += [changed(admitted=[msgspec.structs.replace(decisions.admitted[0], stale_count=99)])]
    if decisions.aborted:
        found += [changed(aborted=())]
    if decisions.trimmed:
        found += [changed(trimmed=[])]
    return found


@settings(max_examples=40)
@given(SEEDS, st.data())
def test_a_schedule_may_break_off_anywhere(seed: int, data: st.DataObject) -> None:
    # covers: C9
    with recorded(seed) as run:
        path = run.run_dir / SCHEDULE_FILE
        content = path.read_bytes()
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        replay = Replay.of_run(run.run_dir)
        batches = list(replay)
        assert not replay.complete
        assert_same(batches, run.made[: len(batches)])
