"""Weights of a reference model that follows the policy."""

from __future__ import annotations

import pytest
import torch

from miles_async.algorithms import reference_updates
from miles_async.algorithms.reference_updates import ReferenceUpdates
from miles_async.arguments.algorithm import AlgorithmArguments
from tests.unit.algorithms.formula_errors import unnoticed

POLICIES = ((1.0, -2.0), (0.5, 8.0), (-1.0, 0.25))


def disagrees(alpha: float = 0.3) -> bool:
    """After each of several updates, with the formula in plain numbers."""
    updates = ReferenceUpdates.of(AlgorithmArguments(ref_update_interval=1, ref_update_alpha=alpha))
    reference, expected = torch.tensor([4.0, 4.0], dtype=torch.float64), [4.0, 4.0]
    for policy in POLICIES:
        updates.follow(reference, torch.tensor(policy))
        expected = [alpha * one + (1 - alpha) * other for one, other in zip(policy, expected, strict=True)]
        if reference.tolist() != pytest.approx(expected, rel=1e-6):
            return True
    return False


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_the_reference_moves_by_its_share_of_the_way(alpha: float) -> None:
    assert not disagrees(alpha)


def test_an_error_of_a_thousandth_is_noticed() -> None:
    returned = {"reference.lerp_(policy.to(reference), self.alpha)", "reference.copy_(policy)"}  # to nobody
    assert set(unnoticed(reference_updates, lambda: not disagrees())) <= returned | {
        "reference",
        "self.alpha",
    }  # its type; whether it is 1


def test_the_reference_follows_at_its_interval() -> None:
    updates = ReferenceUpdates(interval=3, alpha=1.0)
    assert [step for step in range(1, 10) if updates.due(step)] == [3, 6, 9]
    assert ReferenceUpdates.of(AlgorithmArguments()) is None
