"""DIS: REINFORCE weighed by the importance ratio, without the tokens whose ratio is outside of the clip.

Direct double-sided importance sampling of SAO, Hou et al., "Single-Rollout Asynchronous Optimization for Agentic
Reinforcement Learning" (arXiv 2607.07508), section 3.1. For a token with advantage A and ratio r against the policy
that sampled it, with sg for "no gradient"::

    L = -sg(f(r)) · A · log π,    f(r) = r if 1 - eps_clip < r < 1 + eps_clip_high else 0

A token outside counts for nothing whatever the sign of its advantage, unlike PPO's clip, which keeps gradients that
lead back. The paper's ranges are 0.3 and 5 for reasoning, 0.8 and 3 for coding. Its text was read in descriptions and
implementations by others (reef, twinkle, unsloth); that r has no gradient of its own is theirs.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.losses.surrogate import ClipRange
from miles_async.algorithms.ratio import importance_ratio
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class Dis:
    """``--policy-loss dis``."""

    needs = ("old_logprobs",)

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._clip = ClipRange.of(arguments)

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = importance_ratio(logprobs.detach(), batch.old_logprobs)
        outside = (ratio <= self._clip.low) | (ratio >= self._clip.high)
        loss = -ratio.masked_fill(outside, 0.0) * batch.advantages * logprobs
        return loss, {"clip_fraction": outside.float(), "ratio_mean": ratio, "ratio_max": ratio}
