"""SAPO: a sigmoid of the ratio in place of its clip, steeper for negative advantages.

Gao et al., "Soft Adaptive Policy Optimization" (arXiv 2511.20347). For a token with advantage A and ratio
r = π / π_old, with σ the logistic function::

    L = -4 / τ · σ(τ · (r - 1)) · A,    τ = tau_pos if A > 0 else tau_neg

At r = 1 the gradient is REINFORCE's, whatever τ is, and it fades smoothly to both sides. The paper's mean is over
sequences (``--loss-aggregation sequence_mean``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_async.algorithms.ratio import importance_ratio
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class Sapo:
    """``--policy-loss sapo``."""

    needs = ("old_logprobs",)

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._tau_pos, self._tau_neg = arguments.tau_pos, arguments.tau_neg

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, advantages = importance_ratio(logprobs, batch.old_logprobs), batch.advantages
        tau = torch.full_like(advantages, self._tau_neg).masked_fill(advantages > 0, self._tau_pos)
        gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
        return -gate * advantages, {"ratio_mean": ratio, "ratio_max": ratio}
