"""Estimates of KL(π ‖ π_ref) at tokens that π sampled (``--kl-loss-type``), each [N].

With d = log π_ref - log π (Schulman, "Approximating KL Divergence", 2020); differentiable in ``logprobs``. As a loss k2
and k3 push the policy towards the reference. The gradient of k1 is 0 in the mean: it is for rewards and for logging.
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
    """d² / 2: biased, never negative; its gradient is that of the KL in the mean."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - 1 - d: unbiased, never negative."""
    difference = bounded_difference(reference, logprobs)
    return torch.expm1(difference) - difference


def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """|d|: biased, never negative; of one slope whatever the distance (verl's ``abs``)."""
    return (logprobs - reference).abs()


def low_var_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """k3, at most 10, from where on it has no gradient."""
    return k3(logprobs, reference).clamp(max=LARGEST)
