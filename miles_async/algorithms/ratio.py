"""The ratio of two policies at the sampled tokens, finite in float32 whatever they are."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is past every clip and still finite in float32


def importance_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """π / π_old per token, [N], at most exp(20); differentiable below that."""
    return bounded_difference(logprobs, old).exp()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), [N], at most exp(20)."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def bounded_difference(logprobs: Tensor, old: Tensor) -> Tensor:
    """Log π - log π_old per token, [N], at most 20."""
    return (logprobs - old).clamp(max=MAX_LOG_RATIO)
