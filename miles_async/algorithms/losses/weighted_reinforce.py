"""REINFORCE weighed by an importance ratio without gradient: clipped (CISPO), or 0 outside of the clip (DIS).

For a token with advantage A and ratio r = π / π_old, with sg for "no gradient"::

    L = -sg(w) · A · log π

    cispo   w = clip(r, 1 - eps_clip, 1 + eps_clip_high)
    dis     w = r if 1 - eps_clip < r < 1 + eps_clip_high else 0

- CISPO: MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention" (arXiv 2506.13585), eq. 4
  and 5. No token loses its gradient. The paper sets no lower bound (``--eps-clip`` 1 or more) and leaves the upper one
  open;
- DIS: direct double-sided importance sampling of SAO, Hou et al., "Single-Rollout Asynchronous Optimization for Agentic
  Reinforcement Learning" (arXiv 2607.07508), section 3.1; r compares with the policy that sampled. A token outside
  counts for nothing whatever the sign of its advantage, unlike PPO's clip, which keeps gradients that lead back. The
  paper's ranges are 0.3 and 5 for reasoning, 0.8 and 3 for coding. Known from descriptions and
  implementations by others (reef, twinkle, unsloth), which also give r no gradient.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.losses.ppo_clip import ClipRange
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
        weight = self._weight(ratio)
        loss = -weight * batch.advantages * logprobs
        return loss, {"clip_fraction": (weight != ratio).float(), "ratio_mean": ratio, "ratio_max": ratio}

    def _weight(self, ratio: Tensor) -> Tensor:
        return self._clip.bounded(ratio)


class Dis(Cispo):
    """``--policy-loss dis``."""

    def _weight(self, ratio: Tensor) -> Tensor:
        return ratio.masked_fill((ratio <= self._clip.low) | (ratio >= self._clip.high), 0.0)
