"""Limits that an optimizer step has to keep in order to be made, judged alike by all ranks.

The gradient's norm is that over all ranks, and log-prob differences are added up over all ranks before they are judged:
either every rank makes the step or none does. A step that is not made changes neither weights nor the state and step
counters of the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.backends.megatron.distributed import reduce_metrics

Reason = Literal["grad_norm", "logprob_diff", "critic_grad_norm"]
DIFFERENCE = ("logprob_diff_sum", "logprob_diff_tokens")


@dataclass(frozen=True, slots=True)
class Breach:
    """A reason why an optimizer step was not made, and the number that was out of bounds."""

    reason: Reason
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """The limits of a run. None: no limit; a gradient that is not finite is a breach in any case."""

    grad_norm: float | None
    logprob_diff: float | None

    @staticmethod
    def of(arguments: OptimizerArguments) -> StepLimits:
        """Read the limits from the flags."""
        return StepLimits(grad_norm=arguments.grad_norm_limit, logprob_diff=arguments.max_logprob_diff)

    def breach(
        self, norm: float, sums: Mapping[str, Tensor], device: torch.device, *, same_weights: bool
    ) -> Breach | None:
        """Judge an optimizer step whose gradient is ready. Collective: all ranks find the same.

        ``norm``: of the gradient over all ranks. ``sums``: this rank's, of ``mismatch_sums``; on the last pipeline
        stage. ``same_weights``: tokens of age 0 were sampled by the weights that the log-probs in ``sums`` are of.
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
        """Judge the critic's step: a limit of the policy's gradient says nothing about its own."""
        return None if math.isfinite(norm) else Breach("critic_grad_norm", norm)
