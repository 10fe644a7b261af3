"""Rewards as the numbers that advantages are computed from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from miles_async.errors import RewardError
from miles_async.types import Float32, Group

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

LARGEST_REWARD = 1e12  # float32 ends at 3e38, and a gradient norm squares the product of advantages and tokens


def check_reward(reward: float) -> float:
    """Return the reward if it can be trained on.

    Raises RewardError, which costs the attempt; a NaN in the weights would cost the run.
    """
    if not abs(reward) <= LARGEST_REWARD:  # nor is NaN
        raise RewardError(
            f"reward {reward:g}: expected a finite number of at most {LARGEST_REWARD:g} in size; advantages are float32"
        )
    return reward


def rewards_of(groups: Sequence[Group]) -> Float32:
    """float32 [S], rewards of the samples of all groups in order. Finished groups have them all."""
    rewards = [sample.reward for group in groups for sample in group.samples]
    assert None not in rewards, "a group reaches the buffer only when all its samples are rewarded"
    return np.array(rewards, dtype=np.float32)


def sizes_of(groups: Sequence[Group]) -> Int64:
    """int64 [G], samples of each group."""
    return np.array([len(group.samples) for group in groups], dtype=np.int64)


def centered(rewards: Float32, sizes: Int64) -> Float64:
    """float64 [S]: rewards minus the mean of their group, exactly 0 throughout a group whose rewards are all equal.

    Args:
        rewards: float32 [S], groups one after another.
        sizes: int64 [G], at least 1 each, sums to S.
    """
    assert sizes.sum() == len(rewards), (sizes, rewards.shape)
    assert (sizes >= 1).all(), sizes
    if len(rewards) == 0:
        return np.zeros(0)
    starts = np.cumsum(sizes) - sizes
    exact = rewards.astype(np.float64)
    # The sum of equal float32 numbers is exact in float64, and so their mean is what they are.
    means = np.add.reduceat(exact, starts) / sizes
    result: Float64 = exact - np.repeat(means, sizes)
    return result
