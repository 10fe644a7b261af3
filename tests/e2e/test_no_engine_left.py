"""An engine that cannot come back ends the run in order, and a later run goes on where it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from miles_async.checkpoints.files import find_checkpoint
from tests.integration.real_run import QUICKSTART, real_run, traceback_in
from tests.integration.trained_prompts import position, source_order, trained

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SECONDS = 300.0
STEPS, BATCH_SIZE = 12, 16


def test_a_run_without_engines_stops_and_is_resumed(tmp_path: Path) -> None:
    # covers: C2, C8, C9, C10
    model, checkpoints = tmp_path / "model", tmp_path / "checkpoints"
    shutil.copytree(QUICKSTART / "assets" / "reverse" / "model", model)
    config = model / "config.json"  # engines start with random weights, and read no others
    content = config.read_bytes()
    flags = ("--hf-checkpoint", str(model), "--num-rollout", str(STEPS), "--rollout-num-gpus", "1")
    flags += ("--eval-prompt-data", "none", "--eval-interval", "none", "--engine-max-restarts", "1")
    flags += ("--save", str(checkpoints), "--save-interval", "1")

    with real_run(tmp_path / "first", *flags) as run:
        run.wait_for_steps(3, SECONDS)
        config.write_bytes(b"not a configuration")
        [engine] = run.engine_processes()
        engine.kill()
        assert run.wait(SECONDS) == 1, run.output
        run.assert_nothing_left()
    assert "no engine is left; the last, engine-0, was restarted 1 times in 3600 s (--engine-max-" in run.output
    assert not traceback_in(run.output), run.output
    assert run.summary["balanced"]
    saved = position(find_checkpoint(checkpoints).directory)
    assert 2 <= saved < STEPS
    first = [row.prompt_id for row in trained(run.run_dir) if row.step is not None and row.step <= saved]

    config.write_bytes(content)
    with real_run(tmp_path / "second", *flags, "--load", str(checkpoints)) as run:
        assert run.wait(SECONDS) == 0, run.output
        run.assert_nothing_left()
    assert [step["step"] for step in run.steps] == list(range(saved + 1, STEPS + 1))
    second = [row.prompt_id for row in trained(run.run_dir)]
    assert sorted(first + second) == sorted(source_order(STEPS * BATCH_SIZE))
    assert run.summary["logprob_diff"]["max"] < 1e-4
