"""Estimators of advantages from rewards (``--advantage-estimator``): one formula each, side by side.

``registry.ADVANTAGE_ESTIMATORS`` has their rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_async.algorithms.advantages.rewards import Int64, centered, rewards_of, sizes_of
from miles_async.api import AdvantageEstimator
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.types import Branch, Float32, Group

STD_EPSILON = 1e-4


class Grpo:
    """``grpo``, and Dr. GRPO with ``--no-grpo-std-normalization``."""

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._normalize_std = arguments.grpo_std_normalization

    def __call__(self, groups: Sequence[Group]) -> Float32:
        return grpo(rewards_of(groups), sizes_of(groups), normalize_std=self._normalize_std)


def make_rloo(_: AlgorithmArguments) -> AdvantageEstimator:
    """``rloo``."""
    return lambda groups: rloo(rewards_of(groups), sizes_of(groups))


def make_reinforce(_: AlgorithmArguments) -> AdvantageEstimator:
    """``reinforce``: the reward itself (Williams 1992); for ``--token-advantages`` that subtract a baseline."""
    return rewards_of


def make_token_rewards(_: AlgorithmArguments) -> AdvantageEstimator:
    """``token_rewards``: each token's own reward (process rewards, turn rewards), for a critic and
    ``--token-advantages gae``.
    """
    return lambda groups: np.concatenate(
        [
            rewards_of_tokens(branch, sample.reward or 0.0)
            for group in groups
            for sample in group.samples
            for branch in sample.branches
        ]
    )


def make_on_policy_distillation(_: AlgorithmArguments) -> AdvantageEstimator:
    """``on_policy_distillation``: 0, since the teacher's advantage is added later (``distillation``); rewards are only
    logged.
    """
    return lambda groups: np.zeros(sum(len(group.samples) for group in groups), dtype=np.float32)


def grpo(rewards: Float32, sizes: Int64, *, normalize_std: bool = True) -> Float32:
    """(r - mean) / (std + 1e-4) within the group, std with n - 1 in the denominator (DeepSeekMath, arXiv:2402.03300,
    section 4.1.2). Without ``normalize_std``: r - mean (Dr. GRPO, arXiv:2503.20783). A group without spread, and so a
    group of one, gets exactly 0. float32 [S].

    >>> grpo(np.float32([1, 0, 0, 3, 3]), np.array([3, 2]), normalize_std=False)
    array([ 0.6666667, -0.33333334, -0.33333334, 0., 0.], dtype=float32)
    """
    differences = centered(rewards, sizes)
    if normalize_std and len(differences):
        variance = np.add.reduceat(differences**2, np.cumsum(sizes) - sizes) / np.maximum(sizes - 1, 1)
        differences *= np.repeat(1.0 / (np.sqrt(variance) + STD_EPSILON), sizes)
    return differences.astype(np.float32)


def rloo(rewards: Float32, sizes: Int64) -> Float32:
    """R - mean of the others (arXiv:2402.14740, section 2.2; Kool et al. 2019). A group without spread, and so a group
    of one, gets exactly 0. float32 [S].

    >>> rloo(np.float32([1, 0, 0, 3, 3]), np.array([3, 2]))
    array([ 1. , -0.5, -0.5,  0. ,  0. ], dtype=float32)
    """
    # r - (sum - r) / (n - 1) = (r - mean) · n / (n - 1)
    return (centered(rewards, sizes) * np.repeat(sizes / np.maximum(sizes - 1, 1), sizes)).astype(np.float32)


def rewards_of_tokens(branch: Branch, reward: float) -> Float32:
    """float32 [T]: the branch's token rewards, plus ``reward`` at the last token that carries loss."""
    rewards = np.zeros(len(branch.tokens), np.float32) if branch.token_rewards is None else branch.token_rewards.copy()
    rewards[np.flatnonzero(branch.loss_mask)[-1]] += reward
    return rewards
