"""The critic's loss and metrics, worked out by hand.

# covers: C12
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from miles_async.algorithms.aggregation import token_mean
from miles_async.algorithms.value_loss import ValueLoss, value_metrics
from tests.fakes.token_batches import token_batch


def losses(values: Sequence[float], returns: Sequence[float], clip: float | None) -> tuple[float, list[float]]:
    """(sum of the losses, gradients) where all values were 1."""
    now = torch.tensor(values, requires_grad=True)
    batch = token_batch(old=[0.0] * len(values), advantages=[0.0] * len(values))
    before = batch.with_computed("values", torch.ones(len(values)))
    sums = ValueLoss(aggregation=token_mean, clip=clip)(now, torch.tensor(returns), before)
    sums.loss.backward()
    return sums.loss.item(), now.grad.tolist()


@pytest.mark.parametrize(
    ("value", "target", "loss", "gradient"),
    [
        (1.25, 3.0, 1.75**2, -1.75),  # inside of the clip
        (2.0, 3.0, 1.5**2, 0.0),  # moved further than 0.5, towards the return: no more
        (0.0, 3.0, 3.0**2, -3.0),  # moved away from the return: comes back
        (4.0, 2.0, 2.0**2, 2.0),  # past the return by more than the clip was away from it
    ],
)
def test_a_value_that_moved_far_enough_gets_no_gradient(
    value: float, target: float, loss: float, gradient: float
) -> None:
    assert losses([value], [target], 0.5) == (pytest.approx(loss / 2), [pytest.approx(gradient)])


def test_without_a_clip_it_is_the_squared_error() -> None:
    assert losses([2.0, 0.0], [3.0, 3.0], None) == (pytest.approx((1 + 9) / 2), [-1.0, -3.0])


def metrics(values: Sequence[float], returns: Sequence[float], mask: Sequence[float]) -> dict[str, float]:
    batch = token_batch(old=[0.0] * len(values), advantages=[0.0] * len(values), mask=mask)
    before = batch.with_computed("values", torch.tensor(values))
    now = before.values + 1.0
    sums = ValueLoss(aggregation=token_mean, clip=0.5)(now, torch.tensor(returns), before)
    return value_metrics({name: float(value) for name, value in sums.metrics.items()})


def test_metrics_are_means_over_loss_tokens() -> None:
    found = metrics(values=[0.0, 1.0, 50.0, 2.0], returns=[0.0, 2.0, -50.0, 4.0], mask=[1.0, 1.0, 0.0, 1.0])
    assert found["value_mean"] == pytest.approx(1.0)
    assert found["return_mean"] == pytest.approx(2.0)
    # Errors of values before the step: 0, 1, 2; variance 2/3 of 8/3.
    assert found["explained_variance"] == pytest.approx(0.75)
    # Values now are 1, 2, 3 and bounded 0.5, 1.5, 2.5: half of the larger of (1, 0.25), (0, 0.25), (1, 2.25).
    assert found["value_loss"] == pytest.approx((1 + 0.25 + 2.25) / 2 / 3)
    assert found["value_clip_fraction"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("value", [0.1, 3.0])
def test_equal_returns_leave_nothing_to_explain(value: float) -> None:
    assert metrics(values=[0.0, value], returns=[0.1, 0.1], mask=[1.0, 1.0])["explained_variance"] == 0.0


def test_without_a_critic_there_are_no_metrics_of_one() -> None:
    assert value_metrics({"loss": 1.0}) == {}
