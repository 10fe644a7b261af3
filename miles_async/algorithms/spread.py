"""Spread of the policy loss's inputs: advantages, and the ratio of the policies."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from miles_async.algorithms.histogram import SIGNED_MIDDLES, quantile, signed
from miles_async.algorithms.ratio import bounded_difference
from miles_async.algorithms.sequences import loss_tokens
from miles_async.api import TokenBatch

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@torch.no_grad()
def spread_sums(logprobs: Tensor, batch: TokenBatch) -> dict[str, Tensor]:
    """Sums over the loss tokens of one micro-batch. ``logprobs``: [N], of the policy that is trained.

    ``batch``: as the policy loss saw it. Sums of advantages, [4], are over 1, A, A², and 1 where A is 0. The ratio is
    included if the loss or a correction needs π_old.
    """
    mask, advantages = batch.loss_mask.double(), batch.advantages.double() * batch.loss_mask
    found = {
        "advantage_sums": torch.stack(
            [mask.sum(), advantages.sum(), advantages.square().sum(), (mask * (advantages == 0)).sum()]
        ),
        "advantage_abs_max": advantages.abs().max() if advantages.numel() else advantages.sum(),
        "sequences": (loss_tokens(batch) > 0).sum(),
    }
    if "old_logprobs" in batch.computed:
        found["log_ratio_histogram"] = signed(bounded_difference(logprobs, batch.old_logprobs), mask)
    return found


def spread_metrics(reduced: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics from the sums over all ranks and micro-batches."""
    if "advantage_sums" not in reduced:
        return {}
    count, total, squares, zeros = reduced["advantage_sums"].tolist()
    count = max(count, 1.0)
    found = {
        "sequences": float(reduced["sequences"]),
        "advantage_mean": total / count,
        "advantage_std": math.sqrt(max(squares / count - (total / count) ** 2, 0.0)),
        "advantage_abs_max": float(reduced["advantage_abs_max"]),
        "masked_tokens/zero_advantage": zeros,
    }
    if "log_ratio_histogram" in reduced:
        counts = reduced["log_ratio_histogram"].tolist()
        for name, share in QUANTILES.items():
            found[f"ratio_{name}"] = math.exp(quantile(counts, share, SIGNED_MIDDLES))
    return found
