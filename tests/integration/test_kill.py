"""``kill -9`` at a random moment: nothing of the run is left, the error names who died, and ``--load`` goes on exactly.

One run in four lives, which costs the fewest starts: its driver is killed, then the rollout manager's process, then a
trainer's rank; the fourth comes to the end.

# covers: C9, C10, R11
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest

from miles_async.checkpoints import newest_checkpoint
from tests.integration.real_run import RealRun, real_run, traceback_in
from tests.integration.trained_prompts import position, settled, source_order, trained

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

START_SECONDS = 240.0
ENDING_SECONDS = 60.0  # from the kill to the exit
NUM_STEPS, BATCH_SIZE, SEED = 20, 16, 7
FLAGS = ("--num-rollout", str(NUM_STEPS), "--save-interval", "2", "--eval-prompt-data", "none")


def test_kill_9_of_driver_rollout_manager_and_trainer_rank(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    checkpoints = tmp_path / "checkpoints"
    flags = (*FLAGS, "--eval-interval", "none", "--save", str(checkpoints))
    resume = (*flags, "--load", str(checkpoints))

    with real_run(tmp_path / "driver", *flags) as run:
        run.wait_for_steps(3, START_SECONDS)  # the checkpoint of step 2 is whole
        _kill(run, run.process.pid, chance)
        assert run.wait(ENDING_SECONDS) == -9, run.output
        run.assert_nothing_left()
    history = [_check_checkpoint(checkpoints, tmp_path / "driver", [])]

    with real_run(tmp_path / "manager", *resume) as run:
        run.wait_for_steps(2, START_SECONDS)
        _kill(run, _actors(run, "RolloutActor")[0].pid, chance)
        _check_error(run, "error: the rollout manager's process died: ")
    history.append(_check_checkpoint(checkpoints, tmp_path / "manager", history[-1]))

    with real_run(tmp_path / "rank", *resume) as run:
        run.wait_for_steps(2, START_SECONDS)
        _kill(run, chance.choice(_actors(run, "TrainerActor")).pid, chance)
        _check_error(run, "error: trainer rank ")
    history.append(_check_checkpoint(checkpoints, tmp_path / "rank", history[-1]))

    with real_run(tmp_path / "last", *resume) as run:
        assert run.wait(START_SECONDS) == 0, run.output
        run.assert_nothing_left()
    assert run.summary["balanced"]
    assert run.summary["weight_version"] >= NUM_STEPS - 1
    assert [step["step"] for step in run.steps] == list(range(len(history[-1]) // BATCH_SIZE, NUM_STEPS))
    # Exactly once: neither trained twice nor lost, over all that the four lives kept.
    rest = [row.prompt_id for row in trained(tmp_path / "last")]
    assert sorted(history[-1] + rest) == sorted(source_order(NUM_STEPS * BATCH_SIZE))


def _actors(run: RealRun, name: str) -> list[psutil.Process]:
    found = [process for process in run.processes() if " ".join(process.cmdline()).startswith(f"ray::{name}")]
    assert found, f"the run has no process of {name}"
    return sorted(found, key=lambda process: process.pid)


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


def _check_checkpoint(checkpoints: Path, run_dir: Path, before: list[str]) -> list[str]:
    """The newest whole checkpoint agrees with the ledgers. Returns the prompts that were trained up to it.

    A killed process takes the last moments of its ledger along (``ledger_writer.FLUSH_SECONDS``), so the ledger may
    lack what the checkpoint has. It must not have more.
    """
    checkpoint = newest_checkpoint(checkpoints)
    steps, prompts = position(checkpoint), settled(checkpoint)
    assert len(prompts) == len(set(prompts)) == steps * BATCH_SIZE
    assert set(before) <= set(prompts)
    kept = [row.prompt_id for row in trained(run_dir) if row.step is not None and row.step < steps]
    assert len(kept) == len(set(kept))
    assert set(kept) <= set(prompts) - set(before)
    assert len(kept) >= len(prompts) - len(before) - BATCH_SIZE
    return prompts
