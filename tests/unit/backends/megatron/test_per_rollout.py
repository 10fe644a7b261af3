"""State that changes once per rollout step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.algorithms.coefficients import KlCoefficient
from miles_async.backends.megatron.per_rollout import PerRollout


def per_rollout(epochs: int) -> PerRollout:
    adaptive = KlCoefficient(value=0.3, target=0.01, horizon=1000)
    objective: Any = SimpleNamespace(adaptive=adaptive, adapts_to="ref_kl")
    return PerRollout(reference=None, objective=objective, epochs=epochs)


@pytest.mark.parametrize("epochs", [1, 4])
def test_the_coefficient_moves_by_the_samples_of_a_rollout_step_whatever_the_epochs(epochs: int) -> None:
    state = per_rollout(epochs)
    state.update({"ref_kl": 0.1, "sequences": 64.0 * epochs})
    assert state.objective.adaptive is not None
    assert state.objective.adaptive.value == pytest.approx(0.3 * (1 + 0.2 * 64 / 1000))


def test_rollout_steps_are_counted_over_resumes() -> None:
    first, resumed = per_rollout(1), per_rollout(1)
    for _ in range(3):
        first.update({})
    resumed.load(first.sharded_state())
    assert resumed.steps == 3
