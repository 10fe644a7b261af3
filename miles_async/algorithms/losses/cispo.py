"""CISPO: REINFORCE weighed by a clipped importance ratio, so that no token loses its gradient.

MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention" (arXiv 2506.13585), eq. 4 and 5.
For a token with advantage A and ratio r = π / π_old, with sg for "no gradient"::

    L = -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) · A · log π

The paper sets no lower bound: ``--eps-clip 1`` or more. It leaves the upper one open.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.losses.surrogate import ClipRange
from miles_async.algorithms.ratio import importance_ratio
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class Cispo:
    """``--policy-loss cispo``."""

    needs = ("old_logprobs",)

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._clip = ClipRange.of(arguments)

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = importance_ratio(logprobs.detach(), batch.old_logprobs)
        weight = ratio.clamp(self._clip.low, self._clip.high)
        loss = -weight * batch.advantages * logprobs
        return loss, {"clip_fraction": (weight != ratio).float(), "ratio_mean": ratio, "ratio_max": ratio}
