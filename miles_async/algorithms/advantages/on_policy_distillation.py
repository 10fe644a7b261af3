"""On-policy distillation alone: rewards are logged, ``miles_async.algorithms.distillation`` teaches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.types import Float32, Group


class OnPolicyDistillation:
    """``--advantage-estimator on_policy_distillation``: rewards count for nothing, so the advantage is 0."""

    def __init__(self, arguments: AlgorithmArguments) -> None:
        pass

    def __call__(self, groups: Sequence[Group]) -> Float32:
        return np.zeros(sum(len(group.samples) for group in groups), dtype=np.float32)
