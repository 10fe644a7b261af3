"""A smaller learning rate for optimizer steps that few sequences dominate: the step scaling of VCPO.

Huang et al., "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", arXiv:2602.17616. With w the product of
π / π_rollout over the tokens of a sequence that carry loss, π the policy that is about to step::

    share  = (Σ w)² / (B · Σ w²)                        over the B sequences of the optimizer step
    factor = min(1, share / full_share) ** power        power 1/2 for Adam ("sqrt"), 1 ("linear")

The text leaves a share above full_share open; as in the authors' code the factor is 1. The second part of VCPO is
``whole_batch/optimal_baseline.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_async.algorithms.mismatch import effective_sample_size, sequence_importance_log_sums
from miles_async.api import TokenBatch
from miles_async.arguments.optimizer import EssLrScaling, OptimizerArguments

POWERS: dict[EssLrScaling, float] = {"sqrt": 0.5, "linear": 1.0}
LOG_SUMS = "step_importance_log_sums"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepScale:
    """Scales the learning rate of an optimizer step by its effective sample size."""

    power: float
    full_share: float  # from this share on the step has the whole learning rate

    @staticmethod
    def of(arguments: OptimizerArguments) -> StepScale | None:
        """Read the flags; None if every step has the whole learning rate."""
        rule = arguments.ess_lr_scaling
        return None if rule is None else StepScale(power=POWERS[rule], full_share=arguments.ess_lr_full_share)

    @torch.no_grad()
    def sums(self, logprobs: Tensor, batch: TokenBatch) -> dict[str, Tensor]:
        """Return logs of sums over one micro-batch, whose total :meth:`factor` needs. ``logprobs``: [N], by the policy
        that is about to step.
        """
        return {LOG_SUMS: sequence_importance_log_sums(logprobs, batch)}

    def factor(self, log_sums: Tensor) -> float:
        """Return the factor of the learning rate, in (0, 1], from the logs of sums of the whole optimizer step."""
        return min(1.0, effective_sample_size(log_sums) / self.full_share) ** self.power


@contextmanager
def scaled_rates(groups: Sequence[dict[str, Any]], factor: float) -> Iterator[None]:
    """Multiply the learning rates of an optimizer's ``param_groups`` by ``factor``; set them back afterwards."""
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate * factor
    yield
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
