"""Limits of an optimizer step; a step that breaks one is skipped.

The gradient norm and log-prob differences are over all ranks, so either every rank makes the step or none does. A
skipped step changes neither weights nor the optimizer's state and step counters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from miles_async.backends.megatron.distributed import reduce_metrics

Reason = Literal["grad_norm", "logprob_diff", "critic_grad_norm"]
DIFFERENCE = ("logprob_diff_sum", "logprob_diff_tokens")


@dataclass(frozen=True, slots=True)
class Breach:
    """Reason for skipping an optimizer step, and the value out of bounds."""

    reason: Reason
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """The limits of a run. None: no limit; a gradient that is not finite always is a breach."""

    grad_norm: float | None
    logprob_diff: float | None

    def breach(
        self, norm: float, sums: Mapping[str, Tensor], device: torch.device, *, same_weights: bool
    ) -> Breach | None:
        """Check an optimizer step whose gradient is ready. Collective: all ranks return the same.

        ``norm``: of the gradient over all ranks. ``sums``: this rank's ``mismatch_sums``, on the last pipeline stage.
        ``same_weights``: tokens of age 0 were sampled by the weights that scored ``sums``.
        """
        difference = 0.0
        if self.logprob_diff is not None and same_weights:
            zero = torch.zeros((), device=device)
            total = reduce_metrics({name: sums.get(name, zero) for name in DIFFERENCE}, device)
            difference = float(total["logprob_diff_sum"]) / max(float(total["logprob_diff_tokens"]), 1.0)
        if not (math.isfinite(norm) and (self.grad_norm is None or norm <= self.grad_norm)):
            return Breach("grad_norm", norm)
        if self.logprob_diff is not None and not difference <= self.logprob_diff:
            return Breach("logprob_diff", difference)
        return None

    def breach_of_critic(self, norm: float) -> Breach | None:
        """Check the critic's step, to which the limit of the policy's gradient does not apply."""
        return None if math.isfinite(norm) else Breach("critic_grad_norm", norm)
