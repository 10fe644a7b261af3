"""Difference between engine and trainer log-probs: an error where weights are the same, drift where they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from miles_async.algorithms.histogram import magnitudes, quantile
from miles_async.algorithms.sequences import loss_tokens, per_token, sum_of_loss_tokens
from miles_async.api import TokenBatch

FIRST_OF_GROUP = (1, 2, 3, 4, 8, 16)
"""First age of every group of ages but the first, which is age 0. Turns, counted from 0, are grouped alike."""

AGES = ("age_0", "age_1", "age_2", "age_3", "age_4-7", "age_8-15", "age_16+")
TURNS = ("turn_1", "turn_2", "turn_3", "turn_4", "turn_5-8", "turn_9-16", "turn_17+")


@torch.no_grad()
def mismatch_sums(logprobs: Tensor, batch: TokenBatch) -> dict[str, Tensor]:
    """Sums over the loss tokens of one micro-batch, most of them scalars; some are logs of sums, as named.

    ``logprobs``: [N], by the trainer before it steps from the batch's target version. Samples of age 0 were generated
    by these very weights, so there the difference is numerical noise or a bug. (A fresh token in an older sample was
    not: an in-place update keeps the KV cache of older weights.) The rest measures how far the policy has moved:
    KL(rollout ‖ trainer) as mean(log q − log p), and by the k3 estimator r − 1 − log r with r = p / q (Schulman,
    "Approximating KL divergence", 2020).

    Importance weights are r of tokens, and products of r over sequences. Sums by age and by turn, [groups, 3], are over
    1, |log r| and k3 of each token.
    """
    mask = batch.loss_mask
    difference = (batch.rollout_logprobs - logprobs) * mask
    # exp(20) is far above any ratio worth telling apart, and finite
    k3 = torch.expm1((-difference).clamp(max=20.0)) + difference
    same_weights = mask * (batch.oldest_versions == batch.target_version)
    absolute = difference.abs() * same_weights
    ages, turns = batch.ages.clamp(min=0), turns_of(batch)
    return {
        "mismatch_tokens": mask.sum(),
        "rollout_kl": difference.sum(),
        "rollout_kl_k3": (k3 * mask).sum(),
        "logprob_diff_tokens": same_weights.sum(),
        "logprob_diff_sum": absolute.sum(),
        "logprob_diff_max": absolute.max() if absolute.numel() else absolute.sum(),
        "importance_log_sums": importance_log_sums(-difference, mask),
        "sequence_importance_log_sums": sequence_importance_log_sums(logprobs, batch),
        **_grouped("ages", ages, difference, k3, mask),
        **_grouped("turns", turns, difference, k3, mask),
    }


def mismatch_metrics(reduced: Mapping[str, Tensor]) -> dict[str, float]:
    """Means, quantiles and effective sample sizes from the sums over all ranks and micro-batches."""
    scalars = {name: float(values) for name, values in reduced.items() if values.ndim == 0}
    tokens = max(scalars.get("mismatch_tokens", 0.0), 1.0)
    fresh = scalars.get("logprob_diff_tokens", 0.0)
    found = {
        "rollout_kl": scalars.get("rollout_kl", 0.0) / tokens,
        "rollout_kl_k3": scalars.get("rollout_kl_k3", 0.0) / tokens,
        "logprob_diff_tokens": fresh,
        "logprob_diff_mean": scalars.get("logprob_diff_sum", 0.0) / max(fresh, 1.0),
        "logprob_diff_max": scalars.get("logprob_diff_max", 0.0),
    }
    if "ages_sums" not in reduced:
        return found
    found["ess"] = effective_sample_size(reduced["importance_log_sums"])
    found["ess_sequences"] = effective_sample_size(reduced["sequence_importance_log_sums"])
    found |= _by_group("ages", AGES, reduced)
    for name, (count, _, k3) in zip(AGES, reduced["ages_sums"].tolist(), strict=True):
        if count:
            found[f"rollout_kl_k3/{name}"] = k3 / count
    if float(reduced["turns_sums"][1:, 0].sum()):  # several turns
        found |= _by_group("turns", TURNS, reduced)
    return found


def sequence_importance_log_sums(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """The :func:`importance_log_sums` of the sequences that carry loss; w is the product of π / π_rollout over their
    tokens.
    """
    log_ratio = (logprobs - batch.rollout_logprobs).double()
    return importance_log_sums(sum_of_loss_tokens(log_ratio, batch), loss_tokens(batch) > 0)


def effective_sample_size(log_sums: Tensor) -> float:
    """(Σ w)² / (n Σ w²), in (0, 1], from logs of the sums over 1, w and w² (Kong, 1992); 0 without samples."""
    count, total, squares = log_sums.tolist()
    return min(math.exp(2.0 * total - squares - count), 1.0) if count > -math.inf else 0.0


def turns_of(batch: TokenBatch) -> Tensor:
    """int64 [N]: number of the turn, from 0, of each token that carries loss. A turn is a run of such tokens; between
    two turns are answers of the environment.
    """
    carries = batch.loss_mask != 0
    before = torch.zeros_like(carries)
    before[1:] = carries[:-1]
    first = batch.offsets[:-1][batch.offsets.diff() > 0]
    before[first] = False
    begun = (carries & ~before).long().cumsum(0)
    earlier = torch.cat([begun.new_zeros(1), begun])[batch.offsets[:-1]]  # in the sequences before
    return (begun - per_token(earlier, batch.offsets) - 1).clamp(min=0)


def importance_log_sums(log_weights: Tensor, mask: Tensor) -> Tensor:
    """float64 [3]: logs of the sums over 1, w and w² where ``mask`` is 1, both [n]; -inf without any. Logs, since
    weights of long sequences exceed float64, and only their proportions matter.
    """
    logs = log_weights.double().masked_fill(mask == 0, -torch.inf)
    return torch.stack([mask.double().sum().log(), logs.logsumexp(0), (2.0 * logs).logsumexp(0)])


def _grouped(of: str, positions: Tensor, difference: Tensor, k3: Tensor, mask: Tensor) -> dict[str, Tensor]:
    firsts = torch.tensor(FIRST_OF_GROUP, device=positions.device)
    groups, absolute = torch.bucketize(positions, firsts, right=True), difference.abs()
    values = torch.stack([mask, absolute * mask, k3 * mask], dim=1).double()
    return {
        f"{of}_sums": values.new_zeros(len(AGES), 3).index_add(0, groups, values),
        f"{of}_histogram": magnitudes(difference, mask, groups, len(AGES)),
        f"{of}_max": absolute.new_zeros(len(AGES)).scatter_reduce(0, groups, absolute * mask, "amax"),
    }


def _by_group(of: str, names: tuple[str, ...], reduced: Mapping[str, Tensor]) -> dict[str, float]:
    sums, counts, largest = (reduced[f"{of}_{what}"].tolist() for what in ("sums", "histogram", "max"))
    found: dict[str, float] = {}
    for index, name in enumerate(names):
        tokens, total, _ = sums[index]
        if tokens:
            found[f"logprob_diff/{name}/tokens"] = tokens
            found[f"logprob_diff/{name}/mean"] = total / tokens
            found[f"logprob_diff/{name}/p99"] = min(quantile(counts[index], 0.99), largest[index])
            found[f"logprob_diff/{name}/max"] = largest[index]
    return found
