"""The policy that ratios compare with, and the ratio at the sampled tokens, finite in float32 whatever they are.

:func:`interpolated` is the proximal policy of decoupled PPO without a forward pass, from the versions of tokens: Li et
al., "A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy Approximation" (arXiv
2512.06547). For a token of age d, log-linearly between the policy that sampled it and the one that is trained::

    log π_prox = α · log π_rollout + (1 - α) · log π,    α = 1 / max(d, 1),    no gradient

So tokens of age 0 and 1 have the policy that sampled them, as in AReaL's code, and older ones a policy closer to π. In
the second and later optimizer steps of a batch π has moved on while d has not.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.api import TokenBatch

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


def interpolated(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Log π_prox, [N], without gradient. ``logprobs``: of the policy that is trained."""
    share = 1.0 / batch.ages.clamp(min=1).to(logprobs.dtype)
    return share * batch.rollout_logprobs + (1.0 - share) * logprobs.detach()
