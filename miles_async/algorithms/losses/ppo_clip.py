"""PPO's clipped surrogate per token, with the dual clip; and both as functions of a ratio, for other losses.

For a token with advantage A and ratio r = π / π_old::

    S = min(r · A, clip(r, 1 - eps_clip, 1 + eps_clip_high) · A)
    L = -(max(S, eps_clip_c · A) if A < 0 else S)

- clipped surrogate: Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 7;
- dual clip: Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning" (arXiv 1912.09729),
  eq. 5. PPO's minimum bounds r only from the side that an advantage pushes to: for A < 0 a large r, a token that the
  old policy found unlikely, makes loss and gradient as large as r. Past eps_clip_c the loss stays at eps_clip_c · |A|
  and has no gradient. It bounds r, whatever π_old is, before a correction weighs the loss: with ``--use-tis`` a token's
  loss is at most tis_clip · eps_clip_c · |A|;
- advantages shared by all tokens of a sample: Shao et al., "DeepSeekMath" (arXiv 2402.03300), GRPO;
- a wider upper clip, and the mean over tokens instead of samples: Yu et al., "DAPO" (arXiv 2503.14476), eq. 8;
- π_old: the trainer's policy before its first step on the batch, or, with ``--use-rollout-logprobs``, the engine's that
  sampled the token (as stale as it may be): then the clip itself bounds how far off-policy data moves the policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_async.algorithms.ratio import importance_ratio
from miles_async.api import Need, TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class PpoClip:
    """``--policy-loss ppo_clip``."""

    needs: tuple[Need, ...] = ("old_logprobs",)

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._clip = ClipRange.of(arguments)

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = self._ratio_of(logprobs, batch)
        return surrogate_loss(ratio, self._clip.bounded(ratio), batch.advantages, self._clip.cap)

    def _ratio_of(self, logprobs: Tensor, batch: TokenBatch) -> Tensor:
        return importance_ratio(logprobs, batch.old_logprobs)


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
    """(loss of at most cap · |A| where A < 0, whether it was more), each [N]; capped losses have no gradient."""
    most = torch.where(advantages < 0, cap * advantages.abs(), torch.inf)
    return torch.minimum(loss, most), (loss > most).float()
