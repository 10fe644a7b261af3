"""Advantages: how much better a sample did than the others of its group. One number per sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.errors import ConfigurationError, RewardError
from miles_async.types import Float32, Group

Float64 = npt.NDArray[np.float64]

STD_EPSILON = 1e-4
LARGEST_REWARD = 1e12  # float32 ends at 3e38, and a gradient norm squares the product of advantages and tokens


def check_reward(reward: float) -> float:
    """The reward, if it can be trained on. Raises RewardError: it costs its attempt, a NaN in the weights the run."""
    if not abs(reward) <= LARGEST_REWARD:  # nor is NaN
        raise RewardError(
            f"reward {reward:g}: expected a finite number of at most {LARGEST_REWARD:g} in size; advantages are float32"
        )
    return reward


def compute_advantages(groups: Sequence[Group], algorithm: AlgorithmArguments) -> Float32:
    """float32 [S], samples of all groups in order; see :func:`advantages`."""
    return advantages(
        rewards_of(groups),
        [len(group.samples) for group in groups],
        algorithm.advantage_estimator,
        normalize_std=algorithm.grpo_std_normalization,
    )


def rewards_of(groups: Sequence[Group]) -> Float32:
    """float32 [S], rewards of the samples of all groups in order. Finished groups have them all."""
    rewards = [sample.reward for group in groups for sample in group.samples]
    assert None not in rewards, "a group reaches the buffer only when all its samples are rewarded"
    return np.array(rewards, dtype=np.float32)


def advantages(rewards: Float32, group_sizes: Sequence[int], estimator: str, *, normalize_std: bool = True) -> Float32:
    """Advantages of samples whose groups lie one after the other; groups may differ in size (C7).

    - ``grpo``: (r - mean) / (std + 1e-4) within the group, std with n - 1 in the denominator (DeepSeekMath,
      arXiv:2402.03300, section 4.1.2). Without ``normalize_std``: r - mean (Dr. GRPO, arXiv:2503.20783).
    - ``rloo``: r - mean of the others (arXiv:2402.14740, section 2.2; Kool et al. 2019).
    - ``reinforce``: r (Williams 1992).

    For grpo and rloo a group without spread, and so a group of one, gets exactly zero.

    Args:
        rewards: float32 [S].
        group_sizes: sums to S; each at least 1.
        estimator: one of the above.
        normalize_std: for grpo.

    Returns:
        float32 [S].

    Raises:
        ConfigurationError: unknown estimator.

    >>> advantages(np.float32([1, 0, 0, 3, 3]), [3, 2], "rloo")
    array([ 1. , -0.5, -0.5,  0. ,  0. ], dtype=float32)
    """
    if estimator not in ("grpo", "rloo", "reinforce"):
        raise ConfigurationError(f"expected --advantage-estimator grpo, rloo or reinforce, found {estimator!r}")
    sizes = np.asarray(group_sizes, dtype=np.int64)
    assert sizes.sum() == len(rewards), (sizes, rewards.shape)
    assert (sizes >= 1).all(), sizes
    if estimator == "reinforce" or len(rewards) == 0:
        return rewards.astype(np.float32)
    starts = np.cumsum(sizes) - sizes
    exact = rewards.astype(np.float64)
    centered = exact - np.repeat(np.add.reduceat(exact, starts) / sizes, sizes)
    has_spread = np.maximum.reduceat(rewards, starts) > np.minimum.reduceat(rewards, starts)
    scale = _grpo_scale(centered, starts, sizes, normalize_std) if estimator == "grpo" else _rloo_scale(sizes)
    result: Float32 = (centered * np.repeat(np.where(has_spread, scale, 0.0), sizes)).astype(np.float32)
    return result


def _grpo_scale(centered: Float64, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], std: bool) -> Float64:
    if not std:
        return np.ones(len(sizes))
    variance = np.add.reduceat(centered**2, starts) / np.maximum(sizes - 1, 1)
    return 1.0 / (np.sqrt(variance) + STD_EPSILON)


def _rloo_scale(sizes: npt.NDArray[np.int64]) -> Float64:
    # r - (sum - r) / (n - 1) = (r - mean) · n / (n - 1)
    return sizes / np.maximum(sizes - 1, 1)
