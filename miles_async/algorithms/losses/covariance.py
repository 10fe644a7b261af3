"""Clip-Cov and KL-Cov: less gradient for the tokens that take most of the policy's entropy.

Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv 2505.22617). These
are found by the covariance of log-prob and advantage: for each of the N tokens of a rollout batch that carry loss
(eq. 10)::

    C = (log π_old - mean of log π_old) · (A - mean of A)

Clip-Cov (eq. 11, 12) draws max(1, floor(clip_cov_ratio · N)) of the tokens with clip_cov_lb < C < clip_cov_ub, each
with the same chance. Their loss is 0, without gradient; the others have ``ppo_clip``'s. The paper's equation has
no PPO clip; its code has.

KL-Cov (eq. 13, 14) takes the max(1, floor(kl_cov_ratio · N)) tokens of the largest C, as far as it is above 0; tokens
of equal C together. With log-ratio d = log π - log π_old::

    L = -A · exp(d) + ppo_kl_coef · |d|    for these
    L = -A · exp(d)                        for the others

The paper's penalty is KL(π_old ‖ π); |d| is the estimate of it in its authors' code. There is no clip: eps_clip has no
effect.

The authors' code, and verl's, looks at a micro-batch, and at π instead of π_old in later optimizer steps. Here it is
the rollout batch before its first optimizer step, so that packing and ranks don't change the choice. Nor do they change
the draw, which is a function of the token, its place in its sequence and the log-prob with which it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_async.algorithms.losses.ppo_clip import PpoClip
from miles_async.algorithms.ratio import bounded_difference
from miles_async.algorithms.sequences import sequence_of_token
from miles_async.algorithms.whole_batch.transform import Gather
from miles_async.api import Need, TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class ClipCov(PpoClip):
    """``--policy-loss clip_cov``."""

    needs: tuple[Need, ...] = ("old_logprobs", "surveyed")

    def __init__(self, arguments: AlgorithmArguments) -> None:
        super().__init__(arguments)
        self._ratio = arguments.clip_cov_ratio
        self._low, self._high = arguments.clip_cov_lb, arguments.clip_cov_ub

    def survey(self, batches: Sequence[TokenBatch], gather: Gather) -> list[Tensor]:
        """1 at the chosen tokens, else 0; see ``whole_batch.transform.Surveys``."""
        covariances, tokens = _covariances(batches, gather)
        lots = [
            torch.where((found > self._low) & (found < self._high) & (batch.loss_mask != 0), _lots(batch), 2.0)
            for found, batch in zip(covariances, batches, strict=True)
        ]
        ascending = gather(torch.cat([of_batch[of_batch < 1] for of_batch in lots])).sort().values
        last = ascending[: max(1, int(self._ratio * tokens))][-1:].sum()  # 0 where there is none
        return [(of_batch <= last).to(batch.advantages.dtype) for of_batch, batch in zip(lots, batches, strict=True)]

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().__call__(logprobs, batch)
        return loss * (1.0 - batch.surveyed), {**metrics, "cov_chosen_fraction": batch.surveyed}


class KlCov:
    """``--policy-loss kl_cov``."""

    needs: tuple[Need, ...] = ("old_logprobs", "surveyed")

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._ratio, self._coefficient = arguments.kl_cov_ratio, arguments.ppo_kl_coef

    def survey(self, batches: Sequence[TokenBatch], gather: Gather) -> list[Tensor]:
        """1 at the chosen tokens, else 0; see ``whole_batch.transform.Surveys``."""
        covariances, tokens = _covariances(batches, gather)
        carrying = [found[batch.loss_mask != 0] for found, batch in zip(covariances, batches, strict=True)]
        descending = gather(torch.cat(carrying)).sort(descending=True).values
        least = descending[: max(1, int(self._ratio * tokens))][-1:].sum()
        return [
            ((found >= least) & (found > 0) & (batch.loss_mask != 0)).to(batch.advantages.dtype)
            for found, batch in zip(covariances, batches, strict=True)
        ]

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        difference = bounded_difference(logprobs, batch.old_logprobs)
        ratio, penalty = difference.exp(), self._coefficient * difference.abs()
        metrics = {"ratio_mean": ratio, "ratio_max": ratio, "cov_chosen_fraction": batch.surveyed}
        return batch.surveyed * penalty - batch.advantages * ratio, metrics


def _covariances(batches: Sequence[TokenBatch], gather: Gather) -> tuple[list[Tensor], int]:
    """(C of each token, float64 [N] per micro-batch; N of the rollout batch)."""
    sums = [
        torch.stack([(values.double() * batch.loss_mask.double()).sum() for values in _terms(batch)])
        for batch in batches
    ]
    count, logprobs, advantages = gather(torch.stack(sums).sum(0)).view(-1, 3).sum(0)
    tokens = count.clamp(min=1)
    return [
        (batch.old_logprobs.double() - logprobs / tokens) * (batch.advantages.double() - advantages / tokens)
        for batch in batches
    ], int(count)


def _terms(batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones_like(batch.loss_mask), batch.old_logprobs, batch.advantages


def _lots(batch: TokenBatch) -> Tensor:
    """A number in [0, 1) for each token, float64 [N], as if by chance (SplitMix64, Steele et al. 2014)."""
    places = torch.arange(len(batch.tokens), device=batch.tokens.device)
    places = places - batch.offsets[sequence_of_token(batch.offsets)]
    sampled = batch.rollout_logprobs.float().view(torch.int32).long()
    mixed = torch.zeros_like(batch.tokens)
    for part in (batch.tokens, places, sampled):
        mixed = (mixed + part) * -7046029254386353131  # 0x9E3779B97F4A7C15; int64 wraps around
        mixed = (mixed ^ _shifted(mixed, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
        mixed = (mixed ^ _shifted(mixed, 27)) * -7723592293110705685  # 0x94D049BB133111EB
        mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 11).double() * 2.0**-53


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift right and fill with 0: torch fills with the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
