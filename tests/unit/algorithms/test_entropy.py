"""The entropy bonus and its schedule."""

from __future__ import annotations

import pytest
import torch

from miles_async.algorithms import coefficients
from miles_async.algorithms.coefficients import EntropyBonus
from miles_async.algorithms.objective import make_objective
from miles_async.arguments.algorithm import AlgorithmArguments
from tests.fakes.token_batches import token_batch
from tests.unit.algorithms.formula_errors import unnoticed

BEGIN, END = 0.25, 0.1


def loss_and_gradient(progress: float) -> tuple[float, list[float]]:
    """Of three tokens, two of which carry loss, without any advantage."""
    objective = make_objective(AlgorithmArguments(entropy_coef=BEGIN, entropy_coef_end=END))
    batch = token_batch(old=[-1.0] * 3, advantages=[0.0] * 3, mask=[1.0, 0.0, 1.0])
    entropy = torch.tensor([2.0, 50.0, 1.5], dtype=torch.float64, requires_grad=True)
    logprobs = batch.old_logprobs.double()
    sums = objective(logprobs, batch.with_computed("entropy", entropy.detach()), entropy=entropy, progress=progress)
    assert sums.metrics["entropy"] == 3.5
    (sums.loss / sums.count).backward()
    return float((sums.loss / sums.count).detach()), entropy.grad.tolist()


def agrees() -> bool:
    for progress, coefficient in ((0.3, 0.7 * BEGIN + 0.3 * END), (1.5, END)):
        loss, gradient = loss_and_gradient(progress)
        expected = [-coefficient / 2, 0.0, -coefficient / 2]
        if loss != pytest.approx(-coefficient * 3.5 / 2, rel=1e-6) or gradient != pytest.approx(expected, rel=1e-6):
            return False
    return True


def test_the_mean_entropy_of_tokens_is_subtracted_by_its_coefficient_of_the_moment() -> None:
    assert agrees()


def test_an_error_of_a_thousandth_is_noticed() -> None:
    harmless = {"begin", "end"}  # where only whether there is a bonus counts
    assert set(unnoticed(coefficients, agrees)) <= harmless


def test_the_schedule_ends_with_the_run() -> None:
    bonus = EntropyBonus(begin=0.1, end=0.0)
    assert [bonus.coefficient(progress) for progress in (0.0, 0.5, 1.0, 1.5)] == pytest.approx([0.1, 0.05, 0.0, 0.0])


def test_nobody_computes_an_entropy_that_nobody_asks_for() -> None:
    assert "entropy" not in make_objective(AlgorithmArguments()).needs
    assert EntropyBonus.of(AlgorithmArguments()) is None
    for flags in ({"log_entropy": True}, {"entropy_coef": 0.01}, {"entropy_coef_end": 0.01}):
        assert "entropy" in make_objective(AlgorithmArguments(**flags)).needs


def test_a_bonus_begins_changes_and_ends_during_the_run() -> None:
    objective = make_objective(AlgorithmArguments())
    batch = token_batch(old=[-1.0], advantages=[0.0])
    entropy = torch.tensor([2.0])
    for coefficient in (0.25, 0.5):
        objective = objective.changed(entropy=coefficient)
        assert "entropy" in objective.needs
        for progress in (0.0, 0.9):
            assert objective(batch.old_logprobs, batch, entropy=entropy, progress=progress).loss == -coefficient * 2
    assert "entropy" not in objective.changed(entropy=0.0).needs
