"""DPPO: tokens whose probability would move too far from the old policy's get no gradient.

Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879), with the binary
approximations of the divergence: the sampled token against all others. For a token with advantage A, probability
p = π, q = π_old and r = p / q, with sg for "no gradient"::

    D = |p - q|                                            dppo_tv: total variation
    D = q · log(q / p) + (1 - q) · log((1 - q) / (1 - p))   dppo_kl: KL(π_old ‖ π)
    M = 0 if A > 0 and p > q and D > eps_clip_high, or A < 0 and p < q and D > eps_clip; else 1
    L = -M · sg(min(r, eps_clip_c)) · A · log π

Divergences, mask and bound of r follow the authors' code (github.com/sail-sg/Stable-RL), whose flags for the two
thresholds are the clip's. The paper compares with the policy that sampled
(``--use-rollout-logprobs``), and its DPPO has no bound of r (``--eps-clip-c none``). Its settings: ``@preset:dppo``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_async.algorithms.losses.ppo_clip import epsilons
from miles_async.algorithms.ratio import importance_ratio
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments

TINY = 1e-8  # added to 1 - p and 1 - q, which may be 0; as in the authors' code


class DppoTv:
    """``--policy-loss dppo_tv``."""

    needs = ("old_logprobs",)

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._below, self._above = epsilons(arguments)
        self._cap = arguments.eps_clip_c

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        now, old, advantages = logprobs.detach(), batch.old_logprobs, batch.advantages
        divergence = self._divergence(now, old)
        up = (advantages > 0) & (now > old) & (divergence > self._above)
        down = (advantages < 0) & (now < old) & (divergence > self._below)
        masked = (up | down).float()
        ratio = importance_ratio(now, old)
        weight = ratio if self._cap is None else ratio.clamp(max=self._cap)
        loss = -(1.0 - masked) * weight * advantages * logprobs
        return loss, {"clip_fraction": masked, "ratio_mean": ratio, "ratio_max": ratio}

    def _divergence(self, logprobs: Tensor, old: Tensor) -> Tensor:
        """|p - q|, [N]."""
        return (logprobs.exp() - old.exp()).abs()


class DppoKl(DppoTv):
    """``--policy-loss dppo_kl``."""

    def _divergence(self, logprobs: Tensor, old: Tensor) -> Tensor:
        """KL of (q, 1 - q) from (p, 1 - p), [N]."""
        other, old_other = -torch.expm1(logprobs) + TINY, -torch.expm1(old) + TINY
        return old.exp() * (old - logprobs) - torch.expm1(old) * (old_other / other).log()
