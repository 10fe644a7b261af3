"""The factor of the learning rate by effective sample size, against numpy in float64.

# covers: C12
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from torch import Tensor

from miles_async.algorithms import step_scale
from miles_async.algorithms.mismatch import mismatch_metrics, mismatch_sums
from miles_async.algorithms.step_scale import LOG_SUMS, StepScale, scaled_rates
from miles_async.arguments.optimizer import EssLrScaling, OptimizerArguments
from miles_async.backends.megatron.metrics import accumulate
from tests.fakes.token_batches import token_batch
from tests.unit.algorithms.formula_errors import unnoticed
from tests.unit.algorithms.steps import Step, micro_batch, random_step

SEEDS = range(4)
SETTINGS: list[tuple[EssLrScaling, float]] = [("sqrt", 1.0), ("linear", 1.0), ("sqrt", 0.6), ("linear", 0.1)]


def make(rule: EssLrScaling, full_share: float) -> StepScale:
    scale = StepScale.of(OptimizerArguments(ess_lr_scaling=rule, ess_lr_full_share=full_share))
    assert scale is not None
    return scale


def ours(step: Step, parts: Sequence[Sequence[int]], scale: StepScale) -> float:
    total: dict[str, Tensor] = {}
    for part in parts:
        logprobs, batch = micro_batch([step[index] for index in part])
        accumulate(total, scale.sums(logprobs, batch))
    return scale.factor(total[LOG_SUMS])


def reference(step: Step, rule: str, full_share: float) -> float:
    """(Σ w)² / (B Σ w²), w the product of π / π_rollout over the sequence; VCPO, 2602.17616."""
    products = [one for one in step if one.carries_loss]
    logs = np.array([float((one.logprobs - one.rollout).detach()[one.mask].double().sum()) for one in products])
    w = np.exp(logs - logs.max())
    share = w.sum() ** 2 / (len(w) * (w**2).sum())
    ratio = min(1.0, share / full_share)
    return float(np.sqrt(ratio)) if rule == "sqrt" else ratio


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rule", "full_share"), SETTINGS)
@pytest.mark.parametrize("parts", [[range(8)], [[7, 5, 0], [], [1], [2, 3, 4, 6]]])
def test_the_factor_equals_numpy_however_sequences_are_packed(
    seed: int, rule: EssLrScaling, full_share: float, parts: Sequence[Sequence[int]]
) -> None:
    step = random_step(seed)
    assert len(step) == 8
    assert ours(step, parts, make(rule, full_share)) == pytest.approx(reference(step, rule, full_share), rel=1e-6)


def test_an_error_of_a_thousandth_is_noticed() -> None:
    steps = [random_step(seed) for seed in SEEDS]

    def agree() -> bool:
        return all(
            ours(step, [range(8)], make(*setting)) == pytest.approx(reference(step, *setting), rel=1e-6)
            for step in steps
            for setting in SETTINGS
        )

    assert unnoticed(step_scale, agree, metrics=True) == []


def test_fresh_data_has_the_whole_learning_rate() -> None:
    batch = token_batch(old=[-1.0, -2.0, -1.0], advantages=[1.0] * 3, rollout=[-1.0, -2.0, -1.0], lengths=[2, 1])
    scale = make("sqrt", 1.0)
    assert scale.factor(scale.sums(batch.old_logprobs, batch)[LOG_SUMS]) == 1.0


def test_one_sequence_that_outweighs_all_others_makes_a_small_step() -> None:
    batch = token_batch(old=[15.0] + [0.0] * 99, advantages=[1.0] * 100, rollout=[0.0] * 100, lengths=[1] * 100)
    scale = make("linear", 1.0)
    assert scale.factor(scale.sums(batch.old_logprobs, batch)[LOG_SUMS]) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("shift", [-5000.0, -330.0, 0.0, 32.0, 5000.0])
def test_the_factor_does_not_depend_on_the_scale_of_the_weights(shift: float) -> None:
    """Products over long sequences are far from 1, all of them where the policy has moved."""
    weights = [3.0, 0.0, -3.0, 1.0]
    batch = token_batch(
        old=[weight + shift for weight in weights], advantages=[1.0] * 4, rollout=[0.0] * 4, lengths=[1] * 4
    )
    w = np.exp(weights)
    factor = make("linear", 1.0).factor(make("linear", 1.0).sums(batch.old_logprobs, batch)[LOG_SUMS])
    assert factor == pytest.approx(w.sum() ** 2 / (w**2).sum() / 4, rel=1e-9)
    metrics = mismatch_metrics(mismatch_sums(batch.old_logprobs, batch))
    assert metrics["ess"] == metrics["ess_sequences"] == factor


def test_rates_are_scaled_for_one_step_and_set_back() -> None:
    groups = [{"lr": 0.5}, {"lr": 0.125}]
    with scaled_rates(groups, 0.5):
        assert groups == [{"lr": 0.25}, {"lr": 0.0625}]
    assert groups == [{"lr": 0.5}, {"lr": 0.125}]


def test_without_the_flag_there_is_none() -> None:
    assert StepScale.of(OptimizerArguments()) is None
