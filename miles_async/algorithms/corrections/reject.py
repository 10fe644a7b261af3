"""Rejection: tokens or whole sequences at which the policies differ too much get weight 0.

With d = log π - log π_rollout of a token, π as it is at the optimizer step, the statistic (``--rs-statistic``) is::

    ratio    exp(d)
    k1       -d                 estimates KL(π_rollout ‖ π), of either sign
    k2       d² / 2
    k3       exp(d) - 1 - d

of a token, or of the sum or mean over its sequence (``--rs-level``; ratio: exp of the sum or mean of d). It is rejected
outside [rs_lower_bound, rs_upper_bound], and so is a sequence with any token of exp(d) < rs_veto_threshold.

Masked importance sampling as in miles' examples/infra_features/train_infer_mismatch_helper and verl's rollout
correction (verl/trainer/ppo/rollout_corr_helper.py, whose k1 has the bounds of our ratio), after Liu et al., "When
Speed Kills Stability" (2025). Rejected tokens still count in the loss's mean, as in miles; in verl they don't, so the
others weigh more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_async.algorithms.ratio import bounded_exp
from miles_async.algorithms.sequences import at_level
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments, RejectionStatistic


class Reject:
    """``--use-rs``."""

    needs = ()

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._statistic, self._level = arguments.rs_statistic, arguments.rs_level
        self._low, self._high = arguments.rs_lower_bound, arguments.rs_upper_bound
        self._veto = arguments.rs_veto_threshold

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        difference = logprobs - batch.rollout_logprobs
        if self._statistic == "ratio":
            found = bounded_exp(at_level(difference, self._level, batch))
        else:
            found = at_level(statistic(difference, self._statistic), self._level, batch)
        rejected = torch.zeros_like(found, dtype=torch.bool)
        if self._low is not None:
            rejected |= found < self._low
        if self._high is not None:
            rejected |= found > self._high
        if self._veto is not None:
            vetoed = (bounded_exp(difference) < self._veto).to(difference.dtype)
            rejected |= at_level(vetoed, "sequence", batch) > 0
        return (~rejected).to(difference.dtype), {"rs_rejected_fraction": rejected.float()}


def statistic(difference: Tensor, name: RejectionStatistic) -> Tensor:
    """Return k1, k2 or k3 of each token, [N]."""
    if name == "k1":
        return -difference
    if name == "k2":
        return difference.square() / 2.0
    return bounded_exp(difference) - 1.0 - difference
