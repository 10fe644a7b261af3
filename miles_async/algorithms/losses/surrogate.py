"""The clipped surrogate and the dual clip, as functions of the ratio: PPO's is per token, GSPO's per sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_async.arguments.algorithm import AlgorithmArguments


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRange:
    """Bounds of the ratio r = π / π_old."""

    low: float  # 1 - eps_clip
    high: float  # 1 + eps_clip_high
    cap: float | None  # eps_clip_c: of the dual clip

    @staticmethod
    def of(arguments: AlgorithmArguments) -> ClipRange:
        """Read the range from the flags."""
        below, above = epsilons(arguments)
        return ClipRange(low=1.0 - below, high=1.0 + above, cap=arguments.eps_clip_c)

    def bounded(self, ratio: Tensor) -> Tensor:
        """clip(r, low, high)."""
        return ratio.clamp(self.low, self.high)


def epsilons(arguments: AlgorithmArguments) -> tuple[float, float]:
    """(``--eps-clip``, ``--eps-clip-high``), the second by default the first."""
    high = arguments.eps_clip_high
    return arguments.eps_clip, arguments.eps_clip if high is None else high


def surrogate_loss(
    ratio: Tensor, bounded: Tensor, advantages: Tensor, cap: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token, [N], and its metrics. ``bounded``: the ratio within its clip; ``cap``: eps_clip_c
    of the dual clip.
    """
    loss, clipped = clipped_surrogate(ratio, bounded, advantages)
    metrics = {"clip_fraction": clipped, "ratio_mean": ratio, "ratio_max": ratio}
    if cap is not None:
        loss, metrics["dual_clip_fraction"] = dual_clip(loss, advantages, cap)
    return loss, metrics


def clipped_surrogate(ratio: Tensor, bounded: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, whether the clip took the gradient away), each [N]."""
    plain, clipped = ratio * advantages, bounded * advantages
    return -torch.minimum(plain, clipped), (clipped < plain).float()


def dual_clip(loss: Tensor, advantages: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """(loss of at most cap · |A| where A < 0, whether it was more), each [N]; what was more has no gradient."""
    most = torch.where(advantages < 0, cap * advantages.abs(), torch.inf)
    return torch.minimum(loss, most), (loss > most).float()
