"""Advantages against their formulas.

# covers: R10, C7
"""

from __future__ import annotations

import numpy as np
import pytest

from miles_async.algorithms.advantages import LARGEST_REWARD, advantages, check_reward, compute_advantages
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.errors import ConfigurationError, RewardError
from miles_async.staleness.versions import group_of
from tests.property.builders import make_attempt, make_sample

REWARDS = np.array([1, 0, 0, 0, 3, 5], dtype=np.float32)
SIZES = [4, 2]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce"])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_the_largest_rewards_give_finite_advantages_and_gradients(estimator: str, normalize_std: bool) -> None:
    """The gradient is that of a million tokens, squared as in a norm."""
    rewards = np.array([check_reward(LARGEST_REWARD), check_reward(-LARGEST_REWARD), 0.0], np.float32)
    found = advantages(rewards, [3], estimator, normalize_std=normalize_std)
    assert np.isfinite(found).all()
    assert np.isfinite(np.square(found * np.float32(1e6))).all()


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf, 1e39, 1e13, -1e13])
def test_a_reward_that_float32_cannot_take_is_refused(reward: float) -> None:  # covers: C6
    with pytest.raises(RewardError, match=r"reward .*: expected a finite number of at most 1e\+12 in size"):
        check_reward(reward)


def test_grpo_matches_torch() -> None:
    torch = pytest.importorskip("torch")
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.25])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    np.testing.assert_allclose(advantages(rewards.numpy(), [4], "grpo"), expected.numpy(), rtol=1e-6)


def test_grpo_divides_by_the_sample_standard_deviation_of_each_group() -> None:
    found = advantages(REWARDS, SIZES, "grpo")
    expected = [*(np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-4)), *(np.array([-1, 1]) / (2**0.5 + 1e-4))]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.dtype == np.float32


def test_grpo_without_std() -> None:
    assert advantages(REWARDS, SIZES, "grpo", normalize_std=False).tolist() == [0.75, -0.25, -0.25, -0.25, -1, 1]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    expected = [1 - 0, 0 - 1 / 3, 0 - 1 / 3, 0 - 1 / 3, 3 - 5, 5 - 3]
    np.testing.assert_allclose(advantages(REWARDS, SIZES, "rloo"), expected, rtol=1e-6)


def test_reinforce_is_the_reward() -> None:
    assert advantages(REWARDS, SIZES, "reinforce").tolist() == REWARDS.tolist()


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_group_without_spread_or_of_one_sample_teaches_nothing(estimator: str, reward: float) -> None:
    rewards = np.array([reward] * 4, dtype=np.float32)
    assert advantages(rewards, [3, 1], estimator).tolist() == [0, 0, 0, 0]


def test_flags_choose_the_estimator() -> None:
    group = group_of(make_attempt(), [make_sample([0], reward=1.0), make_sample([0], reward=0.0)])
    dr_grpo = AlgorithmArguments(grpo_std_normalization=False)
    assert compute_advantages([group], dr_grpo).tolist() == [0.5, -0.5]
    assert compute_advantages([group], AlgorithmArguments(advantage_estimator="rloo")).tolist() == [1, -1]


def test_unknown_estimator() -> None:
    with pytest.raises(ConfigurationError, match="--advantage-estimator"):
        advantages(REWARDS, SIZES, "gae")
