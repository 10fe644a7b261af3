"""Clip-Cov: PPO's clipped surrogate without a few of the tokens that take most of the policy's entropy.

Cui et al. (arXiv 2505.22617), eq. 12: the loss of a token is that of ``ppo_clip``, and 0 without gradient at the tokens
that were drawn from the rollout batch (``whole_batch.covariance``). Of a batch's tokens clip_cov_ratio is drawn, of
those whose covariance is between clip_cov_lb and clip_cov_ub. The paper's equation has no PPO clip; its code has.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from miles_async.algorithms.losses.surrogate import ClipRange, surrogate_loss
from miles_async.algorithms.ratio import importance_ratio
from miles_async.algorithms.whole_batch.covariance import drawn_between
from miles_async.algorithms.whole_batch.gather import Gather
from miles_async.api import Need, TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class ClipCov:
    """``--policy-loss clip_cov``."""

    needs: tuple[Need, ...] = ("old_logprobs", "surveyed")

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._clip = ClipRange.of(arguments)
        self._ratio = arguments.clip_cov_ratio
        self._low, self._high = arguments.clip_cov_lb, arguments.clip_cov_ub

    def survey(self, batches: Sequence[TokenBatch], gather: Gather) -> list[Tensor]:
        """1 at the chosen tokens, else 0; see ``whole_batch.transform.Surveys``."""
        return drawn_between(batches, self._ratio, self._low, self._high, gather)

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = importance_ratio(logprobs, batch.old_logprobs)
        loss, metrics = surrogate_loss(ratio, self._clip.bounded(ratio), batch.advantages, self._clip.cap)
        return loss * (1.0 - batch.surveyed), {**metrics, "cov_chosen_fraction": batch.surveyed}
