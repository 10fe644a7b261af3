"""The coefficient that follows the KL: its formula, by hand and with errors in it, and what it multiplies."""

from __future__ import annotations

import math

import pytest
import torch

from miles_async.algorithms import coefficients
from miles_async.algorithms.coefficients import KlCoefficient
from miles_async.algorithms.objective import Objective, make_objective
from miles_async.algorithms.token_advantages.kl_in_reward import KlInReward
from miles_async.arguments.algorithm import AlgorithmArguments
from tests.fakes.token_batches import token_batch
from tests.unit.algorithms.formula_errors import unnoticed

KLS = (0.011, 0.0085, 0.1, 0.0, 0.0101)
SEQUENCES = (64.0, 640.0, 100.0, 32.0, 64.0)


def disagrees() -> bool:
    """After each of several rollout steps, with the formula in plain numbers."""
    coefficient, expected = KlCoefficient(value=0.3, target=0.01, horizon=1000), 0.3
    for kl, sequences in zip(KLS, SEQUENCES, strict=True):
        coefficient.adapt(kl, sequences)
        error = (kl - 0.01) / 0.01
        expected = expected + expected * sorted((-0.2, error, 0.2))[1] * sequences / 1000
        if coefficient.value != pytest.approx(expected, rel=1e-7):
            return True
    return False


def test_the_coefficient_moves_towards_the_target_by_a_bounded_share() -> None:
    assert not disagrees()


def test_an_error_of_a_thousandth_is_noticed() -> None:
    assert unnoticed(coefficients, lambda: not disagrees()) == ["kl"]  # where it is asked whether it is finite


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_changes_nothing(kl: float) -> None:
    coefficient = KlCoefficient(value=0.3, target=0.01, horizon=1)
    coefficient.adapt(kl, 64)
    assert coefficient.value == 0.3


def test_without_a_target_it_is_constant() -> None:
    coefficient = KlCoefficient(value=0.3, target=None, horizon=1)
    coefficient.adapt(7.0, 64)
    assert coefficient.value == 0.3
    assert make_objective(AlgorithmArguments(use_kl_loss=True, kl_loss_coef=0.3)).adaptive is None


def adapted(objective: Objective) -> None:
    objective.adaptive.value *= 2


def test_it_is_the_weight_of_the_kl_in_the_loss() -> None:
    objective = make_objective(AlgorithmArguments(use_kl_loss=True, kl_loss_coef=0.5, kl_target=0.1, kl_loss_type="k2"))
    batch = token_batch(old=[-1.0], ref_logprobs=[-3.0], advantages=[0.0])
    assert objective(torch.tensor([-1.0]), batch).loss == 0.5 * 2
    adapted(objective)
    assert objective(torch.tensor([-1.0]), batch).loss == 1.0 * 2
    assert objective(torch.tensor([-1.0]), batch).metrics[objective.adapts_to] == 2


def test_it_is_the_weight_of_the_kl_in_the_reward() -> None:
    objective = make_objective(AlgorithmArguments(token_advantages="kl_in_reward", kl_coef=0.5, kl_target=0.1))
    assert isinstance(objective.token_advantages, KlInReward)
    batch = token_batch(old=[-1.0], ref_logprobs=[-3.0], advantages=[1.0])
    assert objective.advantages(batch) == 1 - 0.5 * 2
    adapted(objective)
    assert objective.advantages(batch) == 1 - 1.0 * 2
    assert objective(batch.old_logprobs, batch).metrics[objective.adapts_to] == 2


def test_it_adapts_to_the_kl_that_was_charged_where_the_loss_interpolates_the_old_policy() -> None:
    objective = make_objective(
        AlgorithmArguments(
            token_advantages="kl_in_reward", kl_coef=0.5, kl_target=0.1, use_tis=True, prox_logp_method="loglinear"
        )
    )
    batch = token_batch(old=[-1.0], rollout=[-2.5], ref_logprobs=[-3.0], advantages=[1.0])
    assert objective.advantages(batch) == 1 - 0.5 * 2
    assert objective(torch.tensor([-1.0]), batch).metrics[objective.adapts_to] == 2


def test_a_constant_weight_changes_in_the_loss_and_in_the_reward() -> None:
    in_loss = make_objective(AlgorithmArguments(use_kl_loss=True, kl_loss_type="k2"))  # 0 at first
    batch = token_batch(old=[-1.0], ref_logprobs=[-3.0], advantages=[0.0])
    assert in_loss(torch.tensor([-1.0]), batch).loss == 0
    assert in_loss.changed(kl_loss=0.5)(torch.tensor([-1.0]), batch).loss == 0.5 * 2
    in_reward = make_objective(AlgorithmArguments(token_advantages="kl_in_reward", kl_coef=0.5))
    batch = token_batch(old=[-1.0], ref_logprobs=[-3.0], advantages=[1.0])
    assert in_reward.changed(kl=0.25).advantages(batch) == 1 - 0.25 * 2
