"""Advantages against their formulas.

# covers: R10, C7
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from miles_async.algorithms.advantages.estimators import grpo, rloo
from miles_async.algorithms.advantages.rewards import LARGEST_REWARD, check_reward, with_reward
from miles_async.algorithms.registry import advantage_estimator
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.errors import RewardError
from miles_async.runtime.serialization import decode, encode
from miles_async.staleness.versions import group_of
from miles_async.types import Float32, RewardParts, Sample, TokenRewards
from tests.property.builders import make_attempt, make_sample

REWARDS = np.array([1, 0, 0, 0, 3, 5], dtype=np.float32)
SIZES = np.array([4, 2])
ESTIMATORS = [grpo, partial(grpo, normalize_std=False), rloo]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_largest_rewards_give_finite_advantages_and_gradients(estimator: Callable[..., Float32]) -> None:
    """The gradient is that of a million tokens, squared as in a norm."""
    rewards = np.array([check_reward(LARGEST_REWARD), check_reward(-LARGEST_REWARD), 0.0], np.float32)
    found = estimator(rewards, np.array([3]))
    assert np.isfinite(found).all()
    assert np.isfinite(np.square(found * np.float32(1e6))).all()


@pytest.mark.parametrize("given", [True, np.bool_(True), 1, np.float64(1.0)])
def test_a_reward_is_kept_as_a_number(given: float) -> None:
    """Checkpoints would not give the others back."""
    sample = make_sample([3])
    branch = np.zeros(len(sample.tokens), np.float32)
    for rewarded in (
        given,
        TokenRewards(reward=given, tokens=(branch,)),
        RewardParts(reward=given, parts={"a": given}),
    ):
        kept = with_reward(sample, rewarded)
        assert type(kept.reward) is float
        assert decode(encode(kept), Sample).reward == 1.0


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf, 1e39, 1e13, -1e13])
def test_a_reward_that_float32_cannot_take_is_refused(reward: float) -> None:  # covers: C6
    with pytest.raises(RewardError, match=r"reward .*: expected a finite number of at most 1e\+12 in size"):
        check_reward(reward)


def test_grpo_matches_torch() -> None:
    torch = pytest.importorskip("torch")
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.25])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    np.testing.assert_allclose(grpo(rewards.numpy(), np.array([4])), expected.numpy(), rtol=1e-6)


def test_grpo_divides_by_the_sample_standard_deviation_of_each_group() -> None:
    found = grpo(REWARDS, SIZES)
    expected = [*(np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-4)), *(np.array([-1, 1]) / (2**0.5 + 1e-4))]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.dtype == np.float32


def test_grpo_without_std() -> None:
    assert grpo(REWARDS, SIZES, normalize_std=False).tolist() == [0.75, -0.25, -0.25, -0.25, -1, 1]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    expected = [1 - 0, 0 - 1 / 3, 0 - 1 / 3, 0 - 1 / 3, 3 - 5, 5 - 3]
    np.testing.assert_allclose(rloo(REWARDS, SIZES), expected, rtol=1e-6)


def test_reinforce_is_the_reward() -> None:
    group = group_of(make_attempt(), [make_sample([0], reward=1.5), make_sample([0], reward=-1.0)])
    assert advantage_estimator(AlgorithmArguments(advantage_estimator="reinforce"))([group]).tolist() == [1.5, -1.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_group_without_spread_or_of_one_sample_teaches_nothing(
    estimator: Callable[..., Float32], reward: float
) -> None:
    rewards = np.array([reward] * 4, dtype=np.float32)
    assert estimator(rewards, np.array([3, 1])).tolist() == [0, 0, 0, 0]


def test_flags_choose_the_estimator() -> None:
    groups = [group_of(make_attempt(), [make_sample([0], reward=1.0), make_sample([0], reward=0.0)])]
    dr_grpo = AlgorithmArguments(grpo_std_normalization=False)
    assert advantage_estimator(dr_grpo)(groups).tolist() == [0.5, -0.5]
    assert advantage_estimator(AlgorithmArguments(advantage_estimator="rloo"))(groups).tolist() == [1, -1]
