"""Estimates of KL(π ‖ π_ref) at tokens that π sampled (``--kl-loss-type``), each [N].

With d = log π_ref - log π (Schulman, "Approximating KL Divergence", 2020); differentiable in ``logprobs``. As losses,
k2 and k3 pull the policy towards the reference. The gradient of k1 is 0 on average: use it for rewards and logging.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_async.algorithms.ratio import bounded_difference

LARGEST = 10.0  # where slime, miles and verl bound low_var_kl


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """-d: unbiased, of either sign, of high variance."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d² / 2: biased, never negative; the mean of its gradient is the KL's."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - 1 - d: unbiased, never negative."""
    difference = bounded_difference(reference, logprobs)
    return torch.expm1(difference) - difference


def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """|d|: biased, never negative, of constant slope (verl's ``abs``)."""
    return (logprobs - reference).abs()


def low_var_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """k3 clamped to 10; no gradient beyond."""
    return k3(logprobs, reference).clamp(max=LARGEST)
