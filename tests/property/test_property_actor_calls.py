"""Calls to ranks over links that lose anything: every rank does everything once, in order, in step with the others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_async.errors import StaleCallError
from miles_async.runtime.cluster.call_once import CallId, CallOnce
from miles_async.simulation.virtual_time import run_in_virtual_time
from miles_async.trainer.actor import TrainerActor
from tests.fakes.lossy_ranks import Faults, lossy_ranks

# covers: C10

STEPS = 6

faults = st.builds(
    Faults,
    request_lost=st.floats(0.0, 0.6),
    reply_lost=st.floats(0.0, 0.6),
    noticed=st.floats(0.0, 1.0),
    repeated=st.floats(0.0, 0.8),
)


@settings(max_examples=60)
@given(faults=faults, ranks=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_whatever_is_lost_every_rank_takes_every_step_once(faults: Faults, ranks: int, seed: int) -> None:
    trainer, actors = lossy_ranks(ranks, faults, random.Random(seed))

    async def steps() -> list[object]:
        answers: list[object] = []
        for step in range(STEPS):
            answers.append(await trainer.train([f"shard {step}"] * ranks))
            await trainer.save(Path(str(step)))
        return answers

    answers = run_in_virtual_time(steps(), limit_seconds=36_000)
    expected = [what for step in range(STEPS) for what in (f"train{(f'shard {step}',)}", f"save{(Path(str(step)),)}")]
    assert [actor.did for actor in actors] == [expected] * ranks
    assert answers == [f"rank 0: train{(f'shard {step}',)}" for step in range(STEPS)]


@given(data=st.data())
def test_a_call_is_executed_once_and_answered_the_same_until_it_is_given_up(data: st.DataObject) -> None:
    """Any order in which requests of a caller arrive, each any number of times."""
    once, did, answered = CallOnce(), [], {}
    wanted: set[int] = set()
    sent: list[CallId] = []
    for number in range(1, 8):
        wanted = {old for old in wanted if data.draw(st.booleans())} | {number}
        sent.append(CallId(number, frozenset(wanted)))
    arrivals = data.draw(st.lists(st.sampled_from(sent), max_size=30))
    newest = CallId(0, frozenset())
    for call in arrivals:
        newest = call if call.number > newest.number else newest

        def work(call: CallId = call) -> object:
            did.append(call.number)
            return object()

        if call.number not in newest.open:
            with pytest.raises(StaleCallError, match=f"call {call.number} arrived after call {newest.number}"):
                once.run(call, work)
        else:
            answer = once.run(call, work)
            assert answered.setdefault(call.number, answer) is answer
    assert len(did) == len(set(did))


def test_ranks_name_methods_by_functions_that_travel() -> None:
    """perform() gets functions of TrainerActor, which have to arrive as such."""
    import pickle

    assert pickle.loads(pickle.dumps(TrainerActor.train)) is TrainerActor.train
