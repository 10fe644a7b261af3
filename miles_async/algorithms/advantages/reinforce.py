"""REINFORCE: the reward itself (Williams 1992)."""

from __future__ import annotations

from collections.abc import Sequence

from miles_async.algorithms.advantages.rewards import rewards_of
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.types import Float32, Group


class Reinforce:
    """``--advantage-estimator reinforce``; the base of ``--token-advantages`` that bring a baseline of their own."""

    def __init__(self, arguments: AlgorithmArguments) -> None:
        pass

    def __call__(self, groups: Sequence[Group]) -> Float32:
        return rewards_of(groups)
