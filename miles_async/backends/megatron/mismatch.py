"""How far the engines' log-probs are from the trainer's: correctness where the weights agree, drift where not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def mismatch_sums(logprobs: Tensor, fields: Mapping[str, Tensor], target_version: int) -> dict[str, Tensor]:
    """Sums over the loss tokens of one micro-batch, all float32 scalars.

    ``logprobs``: [N], by the trainer before it steps from ``target_version``. Tokens of age 0 were sampled from
    these very weights, so there the difference is numerical noise or a bug. The rest measures how far the
    policy has moved: KL(rollout ‖ trainer) on the rollout's samples, plainly as mean(log q − log p) and by the k3
    estimator r − 1 − log r with r = p / q, which is never negative (Schulman, "Approximating KL divergence", 2020).
    """
    mask = fields["loss_mask"]
    difference = (fields["rollout_logprobs"] - logprobs) * mask
    # exp(20) is far above any ratio worth telling apart, and finite
    k3 = torch.expm1((-difference).clamp(max=20.0)) + difference
    same_weights = mask * (fields["weight_versions"] == target_version)
    absolute = difference.abs() * same_weights
    return {
        "mismatch_tokens": mask.sum(),
        "rollout_kl": difference.sum(),
        "rollout_kl_k3": (k3 * mask).sum(),
        "logprob_diff_tokens": same_weights.sum(),
        "logprob_diff_sum": absolute.sum(),
        "logprob_diff_max": absolute.max() if absolute.numel() else absolute.sum(),
    }


def mismatch_metrics(reduced: Mapping[str, float]) -> dict[str, float]:
    """Means from the sums over all ranks and micro-batches."""
    tokens = max(reduced.get("mismatch_tokens", 0.0), 1.0)
    fresh = reduced.get("logprob_diff_tokens", 0.0)
    return {
        "rollout_kl": reduced.get("rollout_kl", 0.0) / tokens,
        "rollout_kl_k3": reduced.get("rollout_kl_k3", 0.0) / tokens,
        "logprob_diff_tokens": fresh,
        "logprob_diff_mean": reduced.get("logprob_diff_sum", 0.0) / max(fresh, 1.0),
        "logprob_diff_max": reduced.get("logprob_diff_max", 0.0),
    }
