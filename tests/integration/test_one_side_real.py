"""Runs of one side: rollouts without a trainer, a trainer on what they left, and one on what a whole run left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from miles_async.rollout.dumps import read_dump
from miles_async.types import JsonObject
from tests.integration.page_views import assert_views_show
from tests.integration.real_run import REVERSE, RealRun, real_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STEPS = 2
REPEATED = 5  # a step of a run of ten
FLAGS = ("--num-rollout", str(STEPS), "--rollout-num-gpus", "1")


def finished(run: RealRun) -> list[JsonObject]:
    """Its steps."""
    assert run.wait(120) == 0, run.output
    run.assert_nothing_left()
    assert len(run.steps) == STEPS
    return run.steps


def logs(run: RealRun) -> set[str]:
    """Names of its log files."""
    return {path.name for path in (run.run_dir / "logs").iterdir()}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory, imported_reverse: tuple[str, ...]) -> str:
    """What rollouts without a trainer left, for ``--load-debug-rollout-data``."""
    root = tmp_path_factory.mktemp("rollouts")
    dumps = str(root / "{rollout_id}.parquet")
    flags = (*FLAGS, "--debug-rollout-only", "--save-debug-rollout-data", dumps)
    with real_run(root / "run", *flags, command=imported_reverse) as run:
        generated = finished(run)
        summary = run.summary
    assert not {"trainer-0.log", "rank_imports.log"} & logs(run)
    assert (summary["ending"], summary["balanced"], summary["publish"]["count"]) == ("finished", True, 0)
    for step in range(1, STEPS + 1):
        dump = read_dump(root / f"{step}.parquet")
        assert (dump.rollout_id, dump.target_version, len(dump.groups)) == (step, 0, 16)
        samples = [sample for group in dump.groups for sample in group.samples]
        assert np.mean([sample.reward for sample in samples]) == pytest.approx(generated[step - 1]["reward/mean"])
        assert all((sample.weight_versions[sample.loss_mask == 1] == 0).all() for sample in samples)
    return dumps


@pytest.fixture(scope="module")
def trained(
    dumps: str, tmp_path_factory: pytest.TempPathFactory, imported_reverse: tuple[str, ...]
) -> Callable[[int], list[JsonObject]]:
    """Number of ranks → the steps of a trainer alone."""

    @functools.cache
    def by(ranks: int) -> list[JsonObject]:
        flags = (*FLAGS, "--actor-num-gpus-per-node", str(ranks), "--load-debug-rollout-data", dumps)
        with real_run(tmp_path_factory.mktemp("trainer") / "run", *flags, command=imported_reverse) as run:
            steps = finished(run)
        assert not {"engine-0.0.log", "engine_imports.log", "rollout.log"} & logs(run)
        return steps

    return by


def test_a_trainer_alone_trains_on_what_rollouts_alone_left(trained: Callable[[int], list[JsonObject]]) -> None:
    # Engines had the weights of the checkpoint, as the trainer had at its first step, and not at its second.
    first, second = trained(2)
    assert first["train/logprob_diff_max"] < 1e-4
    assert second["train/logprob_diff_max"] > 1e-3


@pytest.mark.long
def test_one_rank_trains_alone_what_two_do(trained: Callable[[int], list[JsonObject]]) -> None:
    for one, two in zip(trained(1), trained(2), strict=True):
        for name in ("reward/mean", "train/loss", "train/grad_norm", "train/logprob_diff_mean"):
            assert one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-6), name


@pytest.mark.long
def test_the_page_shows_a_supervised_run(tmp_path: Path) -> None:
    """Which has neither a ledger nor rewards."""
    command = (*REVERSE[:-1], "@examples/quickstart/sft.args")
    with real_run(tmp_path / "run", "--num-rollout", "2", "--actor-num-gpus-per-node", "1", command=command) as run:
        finished(run)
    rows = assert_views_show(run.run_dir)
    assert len(rows) == STEPS * 2
    assert all(row.reward is None and row.trainer_logprobs is not None for row in rows)
    assert not (run.run_dir / "ledger.sqlite").exists()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_step_of_a_whole_run_is_repeated_on_one_rank(tmp_path: Path, imported_reverse: tuple[str, ...]) -> None:
    """From the checkpoint before it and the batch that was dumped, as docs/debugging.md says."""
    dumps = str(tmp_path / "{rollout_id}.parquet")
    saving = ("--save", str(tmp_path / "checkpoints"), "--save-interval", str(REPEATED))
    flags = ("--num-rollout", "10", *saving, "--save-debug-rollout-data", dumps)
    with real_run(tmp_path / "whole", *flags, command=imported_reverse) as run:
        assert run.wait(360) == 0, run.output
        whole = run.steps
    assert [step["step"] for step in whole] == list(range(1, 11))

    loading = ("--load", str(tmp_path / f"checkpoints/iter_{REPEATED:07}"), "--load-debug-rollout-data", dumps)
    alone = (*loading, "--num-rollout", str(REPEATED + 1), "--actor-num-gpus-per-node", "1")
    with real_run(tmp_path / "repeated", *alone, command=imported_reverse) as run:
        assert run.wait(200) == 0, run.output
        [repeated] = run.steps
    assert repeated["step"] == REPEATED + 1
    for name in ("reward/mean", "train/loss", "train/grad_norm", "train/lr", "train/logprob_diff_mean"):
        assert repeated[name] == pytest.approx(whole[REPEATED][name], rel=1e-4, abs=1e-6), name
