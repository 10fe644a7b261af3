"""``--record`` and ``miles-async replay``: what is written, what is found, what is said.

# covers: C11
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.config_file import to_toml
from miles_async.arguments.flag import FlagValue
from miles_async.arguments.live import with_flags
from miles_async.errors import ContractViolation, ReplayDifference, ScheduleError
from miles_async.ledger.schedule import BatchFrame, Cut, Finished, Frame, PoolFrame, ScheduleWriter
from miles_async.runtime.files.run_directory import CONFIG_FILE, SCHEDULE_FILE
from miles_async.train_data.batch_maker import BatchMaker
from miles_async.types import TrainBatch
from miles_async.wiring.decisions import make_pool
from miles_async.wiring.replay import Replay
from tests.property.builders import make_group, make_prompt
from tests.property.recorded_run import BASE, RecordedRun
from tests.unit.commands.command_line import printed

STEPS = 4
RECORDED = Path(__file__).parent / "recorded"  # some time ago, see its README.md


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    """Four steps, and an end."""
    run = RecordedRun(tmp_path / "run", BASE, random.Random(7))
    while len(run.made) < STEPS:
        run.live(10)
    run.end()
    return run


# ---------------------------------------------------------------------------------------------------- the command
def test_replay_says_step_by_step_that_all_is_identical(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "replay", run.run_dir).splitlines()
    assert len(lines) == STEPS + 1
    for step, (batch, line) in enumerate(zip(Replay.of_run(run.run_dir), lines, strict=False), start=1):
        assert line == (
            f"step {step}: 2 groups, {batch.batch.num_branches} samples, {len(batch.batch.tokens)} tokens for version "
            f"{batch.target_version}: identical"
        )
    finished = sum(isinstance(f, PoolFrame) and isinstance(f.call, Finished) for f in run.frames())
    assert lines[-1] == f"steps 1 to 4, {finished} finished groups, {len(run.frames())} frames: all identical"


def test_batches_are_written_for_a_look_at_them(
    run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed(capsys, "replay", run.run_dir, "--output", tmp_path / "batches")
    paths = sorted((tmp_path / "batches").iterdir())
    assert [path.name for path in paths] == [f"step-{step:06}.npz" for step in range(1, STEPS + 1)]
    for path, shards in zip(paths, run.made, strict=True):
        with np.load(path) as arrays:
            assert set(arrays) == {*TrainBatch.__struct_fields__, "attempt_ids", "target_version"}
            assert arrays["target_version"] == shards[0].target_version
            assert len(arrays["attempt_ids"]) == len(arrays["rewards"]) == len(arrays["offsets"]) - 1
            of_ranks = [batch for shard in shards for step in shard.optimizer_steps for batch in step]
            for batch in of_ranks:  # what each rank got, found again in the whole
                for i, sample in enumerate(batch.sample_ids):
                    found = slice(*arrays["offsets"][sample : sample + 2])
                    there = slice(*batch.offsets[i : i + 2])
                    for name in ("tokens", "rollout_logprobs", "weight_versions", "loss_mask"):
                        np.testing.assert_array_equal(arrays[name][found], getattr(batch, name)[there])
                    assert arrays["advantages"][sample] == batch.advantages[i]


def test_a_killed_run_is_replayed_up_to_where_it_ends(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.run_dir / SCHEDULE_FILE
    frames = run.frames()
    last_batch = next(i for i in reversed(range(len(frames))) if isinstance(frames[i], BatchFrame))
    run.overwrite(frames[: last_batch + 1])
    path.write_bytes(path.read_bytes()[:-1])
    lines = printed(capsys, "replay", run.run_dir).splitlines()
    assert lines[-1] == (
        f"the schedule ends with frame {last_batch}, in step {STEPS + 1}: the run was killed, or still runs"
    )
    assert lines[-2].startswith("steps 1 to 3, ")


def test_an_empty_schedule_is_no_error(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    (run.run_dir / SCHEDULE_FILE).write_bytes(b"")
    out = printed(capsys, "replay", run.run_dir)
    assert out.startswith(
        "no step, 0 finished groups, 0 frames: all identical\nthe schedule ends with frame 0, in step 1"
    )


def test_missing_files_are_named(run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"did you mean {run.run_dir}?" in printed(capsys, "replay", tmp_path / "runn", code=2)
    assert "see miles-async replay --help" in printed(capsys, "replay", code=2)
    (run.run_dir / CONFIG_FILE).unlink()
    assert f"there is no file {run.run_dir / CONFIG_FILE}" in printed(capsys, "replay", run.run_dir, code=2)
    (run.run_dir / SCHEDULE_FILE).unlink()
    assert "expected a run with --record, found no schedule.msgpack" in printed(capsys, "replay", run.run_dir, code=2)


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom miles_async.cli import main\n"
        "try: main(['replay', '--help'])\nexcept SystemExit: pass\n"
        "print('LOADED', sorted({'torch', 'ray', 'transformers', 'aiohttp', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "RUN_DIR" in done.stdout
    assert "LOADED []" in done.stdout


def test_a_run_that_was_recorded_before_is_decided_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "replay", RECORDED).endswith("63 frames: all identical\n")


# ------------------------------------------------------------------------------------------------- what it notices
def test_another_order_in_a_batch_is_shown(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    frames = run.frames()
    number = next(i for i, f in enumerate(frames) if isinstance(f, PoolFrame) and f.decisions.batch)
    frame = frames[number]
    assert isinstance(frame, PoolFrame)
    assert isinstance(frame.call, Cut)
    found = list(frame.decisions.batch)
    other = msgspec.structs.replace(frame.decisions, batch=tuple(found[::-1]))
    frames[number] = msgspec.structs.replace(frame, decisions=other)
    run.overwrite(frames)
    assert printed(capsys, "replay", run.run_dir, code=1) == (
        f"error: step 1, frame {number + 1}: after cut(target_version={frame.call.target_version}) "
        f"expected batch {found[::-1]}, found {found}\n"
    )


def test_another_token_is_shown_by_its_array(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    frames = run.frames()
    number, trained = next((i, f.attempt_ids) for i, f in enumerate(frames) if isinstance(f, BatchFrame))
    for i, frame in enumerate(frames):
        if isinstance(frame, PoolFrame) and isinstance(frame.call, Finished):
            group = frame.call.group
            if group.attempt.attempt_id == trained[0]:
                sample = group.samples[0]
                changed = msgspec.structs.replace(sample, tokens=sample.tokens + 1)
                group = msgspec.structs.replace(group, samples=(changed, *group.samples[1:]))
                frames[i] = msgspec.structs.replace(frame, call=Finished(group=group))
    run.overwrite(frames)
    assert f"error: step 1, frame {number + 1}: expected a batch with {{'tokens': '" in printed(
        capsys, "replay", run.run_dir, code=1
    )


def test_an_array_that_the_batch_no_longer_has_is_shown(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    frames = run.frames()
    number, frame = next((i, f) for i, f in enumerate(frames) if isinstance(f, BatchFrame))
    frames[number] = msgspec.structs.replace(frame, digests={**frame.digests, "teacher_logprobs": "00"})
    run.overwrite(frames)
    said = printed(capsys, "replay", run.run_dir, code=1)
    assert f"frame {number + 1}: expected a batch with {{'teacher_logprobs': '00'}}" in said


def difference(run_dir: Path, arguments: Arguments, other: Arguments) -> str:
    """Return what a replay reports if its flags are ``other`` than those of the recorded run."""
    run = RecordedRun(run_dir, arguments, random.Random(3))
    run.live(200)
    run.end()
    assert list(Replay.of_run(run_dir))
    (run_dir / CONFIG_FILE).write_text(to_toml(other))
    with pytest.raises(ReplayDifference) as caught:
        list(Replay.of_run(run_dir))
    return str(caught.value)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("max_weight_staleness", 2, "expected room"),
        ("max_weight_staleness", None, "expected room"),
        ("max_rollout_lead", 1, "expected room"),
        ("batch_order", "completion", "expected batch"),
        ("stale_group_action", "drop", "expected ended[0].outcome 'stale_recycled', found 'stale_drop"),
        ("min_group_fraction", 0.1, "expected trimmed [], found [{'attempt_id'"),
        ("max_prompt_attempts", 1, "expected ended[0].outcome"),
        ("rollout_batch_size", 3, "expected room"),
        ("num_rollout", 1, "expected room"),
        ("advantage_estimator", "rloo", "expected a batch with {'advantages': "),
        ("max_tokens_per_gpu", 1000, "expected a batch with {'layout': "),
        ("actor_num_gpus_per_node", 1, "expected a batch with {'layout': "),
    ],
)
def test_other_flags_decide_something_else(tmp_path: Path, flag: str, value: FlagValue, says: str) -> None:
    assert says in difference(tmp_path / "run", BASE, with_flags(BASE, {flag: value}))


def test_filters_decide_about_the_rests_of_groups_again(tmp_path: Path) -> None:
    trimming = with_flags(BASE, {"min_group_fraction": 0.1})
    filtering = with_flags(trimming, {"group_filter": ("max_length:1",)})
    assert "expected trimmed []" in difference(tmp_path / "run", filtering, trimming)


def test_a_batch_that_cannot_be_made_again_is_a_difference(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ContractViolation("a sample is too old")

    monkeypatch.setattr(BatchMaker, "shards", refuse)
    with pytest.raises(ReplayDifference, match="expected a batch, found a sample is too old"):
        list(Replay.of_run(run.run_dir))


def test_work_of_the_model_is_in_the_schedule(run: RecordedRun) -> None:
    """It decides which rank gets what, and a replay has no model."""
    assert {frame.quadratic_work for frame in run.frames() if isinstance(frame, BatchFrame)} == {0.1}


def test_a_batch_that_was_recorded_without_work_was_shared_out_by_tokens() -> None:
    frame = {"type": "batch", "at": 0.0, "attempt_ids": [1], "digests": {}}
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=Frame)
    assert isinstance(decoded, BatchFrame)
    assert decoded.quadratic_work == 0


def test_the_error_that_a_run_died_of_comes_again(tmp_path: Path) -> None:
    # covers: C6
    run = RecordedRun(tmp_path / "run", with_flags(BASE, {"max_quarantined_prompts": 0}), random.Random(0))
    run.live(1000)
    assert run.over
    run.end()
    assert any("--max-quarantined-prompts 0" in f.decisions.error for f in run.frames() if isinstance(f, PoolFrame))
    replay = Replay.of_run(run.run_dir)
    assert len(list(replay)) == len(run.made)
    assert replay.complete


@pytest.mark.parametrize("position", [8, 100, -3])
def test_a_damaged_file_is_an_error(run: RecordedRun, position: int) -> None:
    path = run.run_dir / SCHEDULE_FILE
    content = bytearray(path.read_bytes())
    content[position] = 0xC1  # never used in msgpack
    path.write_bytes(content)
    with pytest.raises((ScheduleError, ReplayDifference)):
        list(Replay.of_run(run.run_dir))


def test_a_frame_that_follows_from_nothing_is_an_error(run: RecordedRun) -> None:
    frames = run.frames()
    run.overwrite([frame for frame in frames if isinstance(frame, BatchFrame)])
    with pytest.raises(ScheduleError, match="frame 1 does not follow: no such batch was cut"):
        list(Replay.of_run(run.run_dir))
    run.overwrite([f for f in frames if isinstance(f, PoolFrame) and type(f.call).__name__ == "Trained"])
    with pytest.raises(ScheduleError, match=r"frame 1 does not follow: trained\(attempt_ids="):
        list(Replay.of_run(run.run_dir))


# ---------------------------------------------------------------------------------------------------- the recording
async def test_a_full_disk_is_an_error_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ScheduleWriter(tmp_path / SCHEDULE_FILE, flush_seconds=0.001)
    writer._file.close()
    monkeypatch.setattr(writer, "_file", Path("/dev/full").open("wb"))  # noqa: ASYNC230, a device
    record(writer)
    async with asyncio.timeout(10):
        with pytest.raises(ScheduleError, match=r"No space left on device; see --run-dir and --record"):
            await writer.run()
    record(writer)  # what comes later is not kept, and raises nothing
    assert not writer._waiting
    await writer.close()
    assert writer._file.closed


async def test_metadata_that_cannot_be_written_is_an_error_of_the_run(tmp_path: Path) -> None:
    writer = ScheduleWriter(tmp_path / SCHEDULE_FILE)
    record(writer, metadata={"when": object()})
    with pytest.raises(ScheduleError, match="expected plain data in a record, found object"):
        await writer.flush()
    await writer.close()


def record(writer: ScheduleWriter, **prompt: object) -> None:
    pool = make_pool(BASE.rollout, BASE.staleness, record=writer.pool)
    pool.commit(0)
    pool.offer(0, msgspec.structs.replace(make_prompt(), **prompt))
    pool.finished(make_group(pool.issue(0)))


async def test_a_directory_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="--run-dir"):
        ScheduleWriter(tmp_path / "missing" / SCHEDULE_FILE)


def test_metadata_with_nan_equals_itself(tmp_path: Path) -> None:
    """NaN is in data files, and is unequal to itself."""
    run = RecordedRun(tmp_path / "run", BASE, random.Random(7))
    run.pool.offer(0, msgspec.structs.replace(make_prompt(), metadata={"difficulty": float("nan")}))
    run.pool.finished(make_group(run.pool.issue(0)))
    run.end()
    assert list(Replay.of_run(run.run_dir)) == []
