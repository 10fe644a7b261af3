"""Runs of one side: rollouts without a trainer, and a trainer on what they left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_async.rollout.dumps import read_dump
from tests.integration.real_run import RealRun, real_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STEPS = 2
FLAGS = ("--num-rollout", str(STEPS), "--rollout-num-gpus", "1")


def finished(run: RealRun) -> list[dict[str, Any]]:
    """Its steps."""
    assert run.wait(120) == 0, run.output
    run.assert_nothing_left()
    assert len(run.steps) == STEPS
    return run.steps


def logs(run: RealRun) -> set[str]:
    """Names of its log files."""
    return {path.name for path in (run.run_dir / "logs").iterdir()}


def test_a_trainer_alone_trains_on_what_rollouts_alone_left(tmp_path: Path) -> None:
    dumps = str(tmp_path / "dumps" / "{rollout_id}.parquet")
    with real_run(tmp_path / "rollouts", *FLAGS, "--debug-rollout-only", "--save-debug-rollout-data", dumps) as run:
        generated = finished(run)
        summary = run.summary
    assert not {"trainer-0.log", "rank_imports.log"} & logs(run)
    assert (summary["ending"], summary["balanced"], summary["publish"]["count"]) == ("finished", True, 0)
    for step in range(STEPS):
        dump = read_dump(tmp_path / "dumps" / f"{step}.parquet")
        assert (dump.rollout_id, dump.target_version, len(dump.groups)) == (step, 0, 16)
        samples = [sample for group in dump.groups for sample in group.samples]
        assert np.mean([sample.reward for sample in samples]) == pytest.approx(generated[step]["reward/mean"])
        assert all((sample.weight_versions[sample.loss_mask == 1] == 0).all() for sample in samples)

    trained = {}
    for ranks in ("1", "2"):
        flags = (*FLAGS, "--actor-num-gpus-per-node", ranks, "--load-debug-rollout-data", dumps)
        with real_run(tmp_path / f"ranks{ranks}", *flags) as run:
            trained[ranks] = finished(run)
        assert not {"engine-0.0.log", "engine_imports.log", "rollout.log"} & logs(run)
    for one, two in zip(trained["1"], trained["2"], strict=True):
        for name in ("reward/mean", "train/loss", "train/grad_norm", "train/logprob_diff_mean"):
            assert one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-6), name
    # Engines had the weights of the checkpoint, as the trainer had at its first step, and not at its second.
    assert trained["1"][0]["train/logprob_diff_max"] < 1e-4
    assert trained["1"][1]["train/logprob_diff_max"] > 1e-3
