"""``kill -9`` at a random moment: nothing of the run is left, the error names who died, and the run goes on exactly, by
``--load`` or by itself.

# covers: C9, C10, R11
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from miles_async.checkpoints.files import find_checkpoint
from miles_async.rollout.checkpoint import read_snapshot
from miles_async.runtime.processes.restarts import read_restarts
from miles_async.types import Group
from tests.integration.real_run import LEAVING_SECONDS, RealRun, real_run, traceback_in
from tests.integration.trained_prompts import attempts, position, settled, source_order, trained

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

START_SECONDS = 240.0
ENDING_SECONDS = 60.0  # from the kill to the exit
BATCH_SIZE, SEED = 16, 7
FLAGS = ("--save-interval", "2", "--eval-prompt-data", "none", "--eval-interval", "none")


@dataclass(frozen=True)
class Kept:
    """The newest checkpoint."""

    steps: int
    prompts: list[str]  # trained
    groups: tuple[Group, ...]  # finished and not trained


def test_a_killed_driver_engine_and_rank_cost_nothing_but_time(
    tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    """The first life ends with its driver. The second resumes it, loses both engines, then a rank, and restarts."""
    chance, num_steps = random.Random(SEED), 10
    checkpoints = tmp_path / "checkpoints"
    flags = (*FLAGS, "--num-rollout", str(num_steps), "--save", str(checkpoints))

    with real_run(tmp_path / "driver", *flags, command=imported_reverse) as run:
        run.wait_for_steps(3, START_SECONDS)  # the checkpoint of the step before is whole
        # Ray's agents write their titles over what tells whose they are.
        rays = [child for process in run.processes() if process.name() == "raylet" for child in process.children()]
        assert {"ray::DashboardAgent", "ray::RuntimeEnvAgent"} <= {process.name() for process in rays}
        _kill(run, run.process.pid, chance)
        assert run.wait(ENDING_SECONDS) == -9, run.output
        run.assert_nothing_left()
        assert not psutil.wait_procs(rays, timeout=LEAVING_SECONDS)[1]
    first = _check_checkpoint(checkpoints, run, None)

    resume = ("--load", str(checkpoints), "--max-run-restarts", "1")
    with real_run(tmp_path / "run", *flags, *resume, command=imported_reverse) as run:
        run.wait_for_steps(1, START_SECONDS)
        for engine in chance.sample(run.engine_processes(), 2):
            _kill(run, engine.pid, chance)  # goes on by itself, also when no engine is left
        run.wait_for_steps(3, START_SECONDS)
        _kill(run, run.actors("TrainerActor")[0].pid, chance)
        assert run.wait(START_SECONDS) == 0, run.output
        run.assert_nothing_left()
    (restart,) = read_restarts(run.run_dir)
    assert restart.checkpoint is not None
    assert "trainer rank " in restart.reason
    assert f"restarted from {restart.checkpoint} after: {restart.reason}" in run.output
    assert run.summary["ending"] == "finished"
    assert [life["reason"] for life in run.summary["restarts"]] == [restart.reason]
    assert run.summary["balanced"]
    assert run.summary["weight_version"] >= num_steps - 1
    before, kept = Path(restart.run_dir), Path(restart.checkpoint)
    assert _fenced(before) == {"engine-0", "engine-1"}
    _check_restored(first, before)
    lost = json.loads((before / "summary.json").read_text())
    assert (lost["ending"], lost["balanced"]) == ("lost", True)
    # The restored weights are those of the checkpoint. Lives of few steps may have no sample of age 0 to tell by;
    # that a resumed run equals one that never stopped, bit by bit, is `test_megatron_checkpoints.py`'s.
    differences = [summary["logprob_diff"]["max"] for summary in (lost, run.summary)]
    assert all(difference < 1e-4 for difference in differences if difference is not None)
    # Exactly once: what the first life's checkpoint has, what the second added to it, and what came after.
    assert [step["step"] for step in run.steps] == list(range(position(kept) + 1, num_steps + 1))
    already = settled(read_snapshot(kept))
    in_checkpoint = [row for row in trained(before) if row.step is not None and row.step <= position(kept)]
    assert {row.prompt_id for row in in_checkpoint} == set(already) - set(first.prompts)
    rest = [row.prompt_id for row in trained(run.run_dir)]
    assert sorted(already + rest) == sorted(source_order(num_steps * BATCH_SIZE))


@pytest.mark.long
def test_who_is_killed_is_named_and_four_lives_train_each_prompt_once(tmp_path: Path) -> None:
    """The driver is killed, then the rollout manager's process, then a rank; the fourth life only loses its engines."""
    chance, num_steps = random.Random(SEED), 20
    checkpoints = tmp_path / "checkpoints"
    flags = (*FLAGS, "--num-rollout", str(num_steps), "--save", str(checkpoints))
    resume = (*flags, "--load", str(checkpoints))

    with real_run(tmp_path / "driver", *flags) as run:
        run.wait_for_steps(3, START_SECONDS)
        _kill(run, run.process.pid, chance)
        assert run.wait(ENDING_SECONDS) == -9, run.output
        run.assert_nothing_left()
    first = _check_checkpoint(checkpoints, run, None)

    with real_run(tmp_path / "manager", *resume) as run:
        run.wait_for_steps(3, START_SECONDS)
        _kill(run, run.actors("RolloutActor")[0].pid, chance)
        _check_error(run, "error: the rollout manager's process died: ")
    second = _check_checkpoint(checkpoints, run, first)

    with real_run(tmp_path / "rank", *resume) as run:
        run.wait_for_steps(3, START_SECONDS)
        _kill(run, chance.choice(run.actors("TrainerActor")).pid, chance)
        _check_error(run, "error: trainer rank ")
    third = _check_checkpoint(checkpoints, run, second)

    with real_run(tmp_path / "last", *resume) as run:
        run.wait_for_steps(1, START_SECONDS)
        engines = chance.sample(run.engine_processes(), 2)
        _kill(run, engines[0].pid, chance)
        run.wait_for_steps(3, START_SECONDS)
        _kill(run, engines[1].pid, chance)
        assert run.wait(START_SECONDS) == 0, run.output
        run.assert_nothing_left()
    assert _fenced(run.run_dir) == {"engine-0", "engine-1"}
    assert run.summary["balanced"]
    assert run.summary["weight_version"] >= num_steps - 1
    assert [step["step"] for step in run.steps] == list(range(third.steps + 1, num_steps + 1))
    _check_restored(third, run.run_dir)
    # Exactly once: neither trained twice nor lost, over all that the four lives kept.
    rest = [row.prompt_id for row in trained(run.run_dir)]
    assert sorted(third.prompts + rest) == sorted(source_order(num_steps * BATCH_SIZE))


def _kill(run: RealRun, pid: int, chance: random.Random) -> None:
    """Within the next steps: while training, publishing or saving, as it happens."""
    time.sleep(chance.uniform(0.0, 0.6))
    assert run.process.poll() is None, f"the run was over before the kill:\n{run.output}"
    psutil.Process(pid).kill()


def _check_error(run: RealRun, expected: str) -> None:
    assert run.wait(ENDING_SECONDS) == 1, run.output
    run.assert_nothing_left()
    last_line = run.output.splitlines()[-1]
    assert last_line.startswith(expected), run.output
    assert "died" in last_line
    assert not traceback_in(run.output), run.output


def _fenced(run_dir: Path) -> set[str]:
    lines = (run_dir / "logs" / "rollout.log").read_text().splitlines()
    return {entry["engine"] for entry in map(json.loads, lines) if entry["event"] == "engine fenced"}


def _check_checkpoint(checkpoints: Path, run: RealRun, before: Kept | None) -> Kept:
    """The newest whole checkpoint agrees with the ledger of the run, which began with the checkpoint ``before``.

    A killed process takes the last moments of its ledger along (``queued_writer.FLUSH_SECONDS``), so the ledger may
    lack what the checkpoint has. It must not have more.
    """
    directory = find_checkpoint(checkpoints).directory
    snapshot = read_snapshot(directory)
    kept = Kept(steps=position(directory), prompts=settled(snapshot), groups=snapshot.pool.groups)
    assert len(kept.prompts) == len(set(kept.prompts)) == kept.steps * BATCH_SIZE
    already: set[str] = set()
    if before is not None:
        _check_restored(before, run.run_dir)
        already = set(before.prompts)
    assert already <= set(kept.prompts)
    own = [row.prompt_id for row in trained(run.run_dir) if row.step is not None and row.step <= kept.steps]
    assert len(own) == len(set(own))
    assert set(own) <= set(kept.prompts) - already
    assert len(own) >= len(kept.prompts) - len(already) - BATCH_SIZE
    return kept


def _check_restored(kept: Kept, run_dir: Path) -> None:
    """Finished groups go on as they were, and are not generated again."""
    prompts = {group.attempt.prompt.prompt_id for group in kept.groups}
    found = [row for row in attempts(run_dir) if row.prompt_id in prompts]
    assert [(row.attempt_id, row.prompt_id, row.oldest_version, row.response_lengths) for row in found] == [
        (
            group.attempt.attempt_id,
            group.attempt.prompt.prompt_id,
            group.oldest_version,
            tuple(sample.response_length for sample in group.samples),
        )
        for group in kept.groups
    ]
