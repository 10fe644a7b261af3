"""The GRPO loss: PPO's clipped surrogate per token, with corrections for off-policy data.

For a token with advantage A, ratio r = π / π_old::

    S = min(r · A, clip(r, 1 - eps_clip, 1 + eps_clip_high) · A)
    L = -w · (max(S, eps_clip_c · A) if A < 0 else S) + kl_loss_coef · k3(π ‖ π_ref)

- clipped surrogate: Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 7;
- dual clip: Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning" (arXiv 1912.09729),
  eq. 5. PPO's minimum bounds r only from the side that an advantage pushes to: for A < 0 a large r, a token that the
  old policy found unlikely, makes loss and gradient as large as r. Past eps_clip_c the loss stays at eps_clip_c · |A|
  and has no gradient. It bounds r, whatever π_old is, before w weighs it: with ``--use-tis`` a token's loss is at most
  tis_clip · eps_clip_c · |A|;
- advantages shared by all tokens of a sample: Shao et al., "DeepSeekMath" (arXiv 2402.03300), GRPO;
- a wider upper clip, and the mean over tokens instead of samples: Yu et al., "DAPO" (arXiv 2503.14476), eq. 8;
- π_old: the trainer's policy before its first step on the batch, or, with ``--use-rollout-logprobs``, the engine's that
  sampled the token (as stale as it may be): then the clip itself bounds how far off-policy data moves the policy;
- w = min(π_old / π_rollout, tis_clip), without gradient, with ``--use-tis``: truncated importance sampling between the
  engine's policy and the trainer's; Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
  Training" (2025), after Ionides, "Truncated Importance Sampling" (2008);
- k3 = exp(d) - 1 - d with d = log π_ref - log π: Schulman, "Approximating KL Divergence" (2020).

Sums, not means: the backend divides by the loss tokens of the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from miles_async.arguments.algorithm import AlgorithmArguments

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is past every clip and still finite in float32


class GrpoLoss:
    """Implements PolicyLoss for ``arguments``."""

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self.arguments = arguments
        self.needs_old_logprobs = not arguments.use_rollout_logprobs
        self.needs_reference = arguments.use_kl_loss
        self.needs_entropy = arguments.log_entropy
        high = arguments.eps_clip_high
        self._low, self._high = 1.0 - arguments.eps_clip, 1.0 + (arguments.eps_clip if high is None else high)

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over loss tokens of the loss, and metric sums; see PolicyLoss. 0 where no token carries loss."""
        mask = batch["loss_mask"]
        old = batch["rollout_logprobs"] if self.arguments.use_rollout_logprobs else batch["old_logprobs"]
        loss, ratio, clipped = clipped_surrogate(logprobs, old, batch["advantages"], self._low, self._high)
        sums = {
            "clip_fraction": _sum(clipped, mask),
            "ratio_mean": _sum(ratio, mask),
            "ratio_max": _max(ratio, mask),
        }
        if entropy is not None:
            sums["entropy"] = _sum(entropy, mask)
        if self.arguments.eps_clip_c is not None:
            loss, capped = dual_clip(loss, batch["advantages"], self.arguments.eps_clip_c)
            sums["dual_clip_fraction"] = _sum(capped, mask)
        if self.arguments.use_tis:
            weight, capped = truncated_weight(old, batch["rollout_logprobs"], self.arguments.tis_clip)
            loss = loss * weight
            sums |= {
                "tis_weight_mean": _sum(weight, mask),
                "tis_weight_max": _max(weight, mask),
                "tis_capped_fraction": _sum(capped, mask),
            }
        sums["policy_loss"] = _sum(loss, mask)
        if self.arguments.use_kl_loss:
            divergence = kl_k3(logprobs, batch["ref_logprobs"])
            loss = loss + self.arguments.kl_loss_coef * divergence
            sums["ref_kl"] = _sum(divergence, mask)
        return (loss * mask).sum(), {name: value.detach() for name, value in sums.items()}


def clipped_surrogate(
    logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, ratio, whether the clip took the gradient away), each [N]."""
    ratio = (logprobs - old).clamp(max=MAX_LOG_RATIO).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(low, high) * advantages
    return -torch.minimum(plain, bounded), ratio.detach(), (bounded < plain).float()


def dual_clip(loss: Tensor, advantages: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """(loss of at most cap · |A| where A < 0, whether it was more), each [N]; what was more has no gradient."""
    most = torch.where(advantages < 0, cap * advantages.abs(), torch.inf)
    return torch.minimum(loss, most), (loss > most).float()


def truncated_weight(old: Tensor, rollout: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """(min(π_old / π_rollout, cap) without gradient, whether it was capped), each [N]."""
    weight = (old - rollout).detach().clamp(max=MAX_LOG_RATIO).exp()
    return weight.clamp(max=cap), (weight > cap).float()


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, never negative estimate of KL(π ‖ π_ref) per token, differentiable, [N]."""
    difference = (reference - logprobs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum()


def _max(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).max() if values.numel() else values.sum()
