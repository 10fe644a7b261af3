"""GRPO: rewards relative to their group, in units of its standard deviation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_async.algorithms.advantages.rewards import Int64, centered, rewards_of, sizes_of
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.types import Float32, Group

STD_EPSILON = 1e-4


class Grpo:
    """``--advantage-estimator grpo``, and Dr. GRPO with ``--no-grpo-std-normalization``."""

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._normalize_std = arguments.grpo_std_normalization

    def __call__(self, groups: Sequence[Group]) -> Float32:
        return grpo(rewards_of(groups), sizes_of(groups), normalize_std=self._normalize_std)


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
