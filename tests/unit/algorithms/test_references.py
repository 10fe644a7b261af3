"""Losses and gradients equal independent references to 1e-6, in any division into micro-batches.

# covers: C12, R10
"""

from __future__ import annotations

import pytest
import torch

from miles_async.algorithms import registry
from miles_async.algorithms.whole_batch.transform import WholeBatch
from tests.unit.algorithms.cases import (
    CASES,
    SEEDS,
    TOLERANCE,
    Case,
    differs,
    disagreement,
    objective_of,
    ours,
    ours_of_critic,
)
from tests.unit.algorithms.ranks import alone
from tests.unit.algorithms.references import AGGREGATIONS, POLICY_LOSSES
from tests.unit.algorithms.steps import micro_batch

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_algorithm_has_a_reference() -> None:
    assert set(POLICY_LOSSES) == set(registry.POLICY_LOSSES)
    assert set(AGGREGATIONS) == set(registry.AGGREGATIONS)


@each_case
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_and_gradient_equal_the_reference(case: Case, seed: int) -> None:
    assert disagreement(case, seed) == ""


@each_case
@pytest.mark.parametrize(
    "parts",
    [[[0], [1], [2], [3], [4], [5], [6], [7]], [[7, 2, 5], [0], [6, 1, 4, 3]], [[5], [], [3, 2, 1, 0, 4, 6, 7]]],
    ids=["one sequence each", "mixed", "without loss"],
)
def test_division_into_micro_batches_changes_nothing(case: Case, parts: list[list[int]]) -> None:
    step, objective = case.step(3), objective_of(case)
    assert differs(ours(step, objective, parts), ours(step, objective), 1e-10) == ""


@pytest.mark.parametrize("case", [case for case in CASES if "values" in objective_of(case).needs], ids=lambda c: c.name)
def test_division_into_micro_batches_changes_nothing_for_the_critic(case: Case) -> None:
    step, objective = case.step(3), objective_of(case)
    whole = ours_of_critic(step, objective, case.value_clip)
    for parts in ([[0], [1], [2], [3], [4], [5], [6], [7]], [[5], [], [3, 2, 1, 0, 4, 6, 7]]):
        assert differs(ours_of_critic(step, objective, case.value_clip, parts), whole, 1e-10) == ""


@each_case
def test_float32_is_finite_and_close(case: Case) -> None:
    """The precision of a run."""
    step, objective = case.step(1), objective_of(case)
    logprobs, batch = micro_batch(step, torch.float32)
    (batch,) = objective.prepared([batch], WholeBatch(gather=alone))
    sums = objective(logprobs, batch)
    sums.loss.backward()
    assert torch.isfinite(logprobs.grad).all()
    assert all(bool(torch.isfinite(value)) for value in sums.metrics.values())
    expected, _ = ours(step, objective)
    assert (sums.loss / sums.count).item() == pytest.approx(float(expected), rel=TOLERANCE * 100)
