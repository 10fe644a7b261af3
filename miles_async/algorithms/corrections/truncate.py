"""Truncated importance sampling between the engine's policy, which sampled, and the trainer's.

Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), after Ionides, "Truncated
Importance Sampling" (2008).
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.ratio import importance_ratio
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class Truncate:
    """``--tis-mode truncate``: min(π_old / π_rollout, tis_clip)."""

    needs = ("old_logprobs",)

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._cap = arguments.tis_clip

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = importance_ratio(batch.old_logprobs, batch.rollout_logprobs)
        weight = ratio.clamp(max=self._cap)
        return weight, {
            "tis_weight_mean": weight,
            "tis_weight_max": weight,
            "tis_capped_fraction": (ratio > self._cap).float(),
        }
