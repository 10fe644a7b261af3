"""SAT: PPO's clipped surrogate, with a narrower clip at tokens whose ratio shows that they are stale.

Yang et al., "Stale but Stable: Staleness-Adaptive Trust Regions for Stabilizing Asynchronous Reinforcement Learning"
(arXiv 2607.18722), as its authors' project page states it (eq. 3.1 to 3.6). For a token with advantage A, ratio r
against the policy that sampled it, and d = log r without gradient::

    q = the sat_quantile of |d| over the tokens that carry loss: the smallest |d| that so large a share does not exceed
    c = 1 / (1 + (|d| / q)²) if q > 0 and |d| > q else 1
    L = -min(r · A, clip(r, 1 - eps_clip · (c if d < 0 else 1), 1 + eps_clip_high · (c if d > 0 else 1)) · A)

So the stalest tokens lose their gradient earlier in the direction that leads further away; gradients that lead back are
kept, and tokens below the quantile have PPO's clip. ``sat_gspo`` has GSPO's ratio of the sequence for r, in d and q
too. The paper's quantile is 0.90, its clip 0.2 on both sides, without a dual clip (``--eps-clip-c``).

The paper takes q from the micro-batch at every optimizer step; here it comes from the rollout batch before its first
optimizer step, so that packing and ranks don't change it. That costs a forward pass over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from miles_async.algorithms.losses.gspo import sequence_log_ratio
from miles_async.algorithms.losses.ppo_clip import epsilons, surrogate_loss
from miles_async.algorithms.ratio import bounded_difference
from miles_async.algorithms.whole_batch.transform import Gather
from miles_async.api import Need, TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class Sat:
    """``--policy-loss sat``."""

    needs: tuple[Need, ...] = ("old_logprobs", "trainer_logprobs", "surveyed")

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._below, self._above = epsilons(arguments)
        self._cap, self._quantile = arguments.eps_clip_c, arguments.sat_quantile

    def survey(self, batches: Sequence[TokenBatch], gather: Gather) -> list[Tensor]:
        """q, at every token; see ``whole_batch.transform.Surveys``."""
        staleness = [self._log_ratio(batch.trainer_logprobs, batch).abs() for batch in batches]
        carrying = [of_batch[batch.loss_mask != 0] for of_batch, batch in zip(staleness, batches, strict=True)]
        scale = lower_quantile(gather(torch.cat(carrying)), self._quantile)
        return [scale.expand_as(of_batch) for of_batch in staleness]

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = self._log_ratio(logprobs, batch)
        factor = contraction(log_ratio.detach(), batch.surveyed)
        ratio = log_ratio.exp()
        # Both ends: the one on the other side of 1 bounds no ratio.
        bounded = ratio.clamp(1.0 - self._below * factor, 1.0 + self._above * factor)
        loss, metrics = surrogate_loss(ratio, bounded, batch.advantages, self._cap)
        return loss, {**metrics, "sat_contracted_fraction": (factor < 1).float(), "sat_contraction_mean": factor}

    def _log_ratio(self, logprobs: Tensor, batch: TokenBatch) -> Tensor:
        return bounded_difference(logprobs, batch.old_logprobs)


class SatGspo(Sat):
    """``--policy-loss sat_gspo``."""

    def _log_ratio(self, logprobs: Tensor, batch: TokenBatch) -> Tensor:
        return sequence_log_ratio(logprobs, batch.old_logprobs, batch)


def contraction(log_ratio: Tensor, scale: Tensor) -> Tensor:
    """c, [N]. ``scale``: q, [N]."""
    staleness = log_ratio.abs()
    factor = 1.0 / (1.0 + (staleness / scale).square())
    return torch.where((scale > 0) & (staleness > scale), factor, 1.0)


def lower_quantile(values: Tensor, share: float) -> Tensor:
    """The smallest of ``values`` [n] that at least this share of them does not exceed, a scalar; 0 of none.

    >>> lower_quantile(torch.tensor([3.0, 1.0, 2.0, 4.0]), 0.5)
    tensor(2.)
    """
    place = max(math.ceil(share * len(values) - 1e-9), 1)  # 0.7 · 10 is slightly above 7
    return values.sort().values[place - 1 : place].sum()
