"""RLOO: rewards relative to the other samples of their group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_async.algorithms.advantages.rewards import Int64, centered, rewards_of, sizes_of
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.types import Float32, Group


class Rloo:
    """``--advantage-estimator rloo``."""

    def __init__(self, arguments: AlgorithmArguments) -> None:
        pass

    def __call__(self, groups: Sequence[Group]) -> Float32:
        return rloo(rewards_of(groups), sizes_of(groups))


def rloo(rewards: Float32, sizes: Int64) -> Float32:
    """R - mean of the others (arXiv:2402.14740, section 2.2; Kool et al. 2019). A group without spread, and so a group
    of one, gets exactly 0. float32 [S].

    >>> rloo(np.float32([1, 0, 0, 3, 3]), np.array([3, 2]))
    array([ 1. , -0.5, -0.5,  0. ,  0. ], dtype=float32)
    """
    # r - (sum - r) / (n - 1) = (r - mean) · n / (n - 1)
    return (centered(rewards, sizes) * np.repeat(sizes / np.maximum(sizes - 1, 1), sizes)).astype(np.float32)
