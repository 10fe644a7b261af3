"""``--on-policy`` against the loop that it stands for, written plainly: generate, train, publish, strictly in turn.

Compared with the plain loop is all of a run that no sampling decides: who is trained when, in which order and from
which weights. What sampling decides is compared between two runs, which one engine and one request at a time make
reproducible to the last bit: the order of requests decides who gets which random numbers.

# covers: C11, C2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles_async.staleness.ledger_reader import AttemptRecord
from tests.integration.real_run import RealRun, real_run
from tests.integration.trained_prompts import attempts, source_order

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]

RUN_SECONDS = 300.0
NUM_STEPS, BATCH_SIZE, GROUP_SIZE = 4, 16, 8
ON_POLICY = ("--on-policy", "--eval-prompt-data", "none", "--eval-interval", "none")


@dataclass(frozen=True)
class Trained:
    """One group, as the optimizer got it."""

    step: int
    attempt_id: int
    prompt_id: str
    admitted_under: int  # version
    sampled_by: tuple[int, int]  # oldest and newest version of the tokens that carry loss
    trained_from: int  # version
    num_samples: int


def reference_loop() -> Iterator[Trained]:
    """On-policy training without any of our code but the order of the prompts."""
    prompts = iter(source_order(NUM_STEPS * BATCH_SIZE))
    attempt_id = version = 0
    for step in range(NUM_STEPS):
        for _ in range(BATCH_SIZE):
            yield Trained(step, attempt_id, next(prompts), version, (version, version), version, GROUP_SIZE)
            attempt_id += 1
        version += 1  # one optimizer step, published before the next prompt is taken


def as_trained(row: AttemptRecord) -> Trained:
    assert row.step is not None, row
    assert row.target_version is not None, row
    assert row.oldest_version is not None, row
    assert row.newest_version is not None, row
    return Trained(
        step=row.step,
        attempt_id=row.attempt_id,
        prompt_id=row.prompt_id,
        admitted_under=row.issued_version,
        sampled_by=(row.oldest_version, row.newest_version),
        trained_from=row.target_version,
        num_samples=len(row.response_lengths or ()),
    )


def test_on_policy_is_the_plain_loop(tmp_path: Path) -> None:
    with real_run(tmp_path / "run", "--num-rollout", str(NUM_STEPS), *ON_POLICY) as run:
        assert run.wait(RUN_SECONDS) == 0, run.output
        run.assert_nothing_left()
    rows = attempts(run.run_dir)

    assert [as_trained(row) for row in rows] == list(reference_loop())  # nothing else was ever issued, nor twice
    # Strictly in turn by the clock, too: nothing of a step is admitted before all of the step before has been trained.
    for step in range(1, NUM_STEPS):
        last_trained = max(row.ended_at or 0.0 for row in rows if row.step == step - 1)
        assert min(row.issued_at for row in rows if row.step == step) >= last_trained
    # What was reported is what was trained.
    for record in run.steps:
        rewards = [row.reward_mean or 0.0 for row in rows if row.step == record["step"]]
        assert record["reward/mean"] == pytest.approx(sum(rewards) / BATCH_SIZE, abs=1e-6)
        assert record["weight_version/trainer"] == record["weight_version/min"] == record["weight_version/max"]
        assert record["age/max"] == 0
        assert record["mixed_version_ratio"] == 0
    assert run.summary["age_histogram"] == {"0": NUM_STEPS * BATCH_SIZE * GROUP_SIZE}


def test_two_runs_with_the_same_seeds_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    flags = ("--num-rollout", "3", "--rollout-batch-size", "4", "--global-batch-size", "32", *ON_POLICY)
    flags += ("--rollout-num-gpus", "1", "--rollout-concurrency-per-engine", "1")
    with real_run(tmp_path / "one", *flags) as one, real_run(tmp_path / "two", *flags) as two:
        assert one.wait(RUN_SECONDS) == 0, one.output
        assert two.wait(RUN_SECONDS) == 0, two.output
    assert len(one.steps) == 3
    assert _what_happened(one) == _what_happened(two)


def _what_happened(run: RealRun) -> tuple[list[Any], list[Any]]:
    """Everything but times: groups as they were sampled and rewarded, metrics of the steps (loss, gradient, ...)."""
    groups = [(as_trained(row), row.response_lengths, row.reward_mean) for row in attempts(run.run_dir)]
    timed = ("time", "publish/", "rollout/")  # gauges are of a moment
    steps = [{k: v for k, v in step.items() if not k.startswith(timed) and "seconds" not in k} for step in run.steps]
    return groups, steps
