"""Sums over the sequences of a micro-batch: ``offsets`` int64 [S + 1], sequence s is [offsets[s], offsets[s + 1])."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import CorrectionLevel


def mean_per_sequence(values: Tensor, batch: TokenBatch) -> Tensor:
    """[N] → [N]: at each token the mean over the tokens of its sequence that carry loss, 0 if none does."""
    return per_token(sum_of_loss_tokens(values, batch) / loss_tokens(batch).clamp(min=1), batch.offsets)


def at_level(values: Tensor, level: CorrectionLevel, batch: TokenBatch) -> Tensor:
    """[N] → [N]: values of tokens (token), or their sum (sequence) or mean (geometric: of log-ratios) over the tokens
    of their sequence that carry loss.
    """
    if level == "token":
        return values
    if level == "geometric":
        return mean_per_sequence(values, batch)
    return per_token(sum_of_loss_tokens(values, batch), batch.offsets)


def sum_of_loss_tokens(values: Tensor, batch: TokenBatch) -> Tensor:
    """[N] → [S]: per sequence the sum over its tokens that carry loss; differentiable."""
    return sum_per_sequence(values * batch.loss_mask, batch.offsets)


def loss_tokens(batch: TokenBatch) -> Tensor:
    """[S]: tokens of each sequence that carry loss."""
    return sum_per_sequence(batch.loss_mask, batch.offsets)


def per_token(values: Tensor, offsets: Tensor) -> Tensor:
    """[S] → [N]: at each token the value of its sequence."""
    return values[sequence_of_token(offsets)]


def sum_per_sequence(values: Tensor, offsets: Tensor) -> Tensor:
    """[N] → [S]; differentiable. 0 for an empty sequence."""
    sums = values.new_zeros(len(offsets) - 1)
    return sums.index_add(0, sequence_of_token(offsets), values)


def sum_to_go(values: Tensor, offsets: Tensor) -> Tensor:
    """[N] → [N]: at each token the sum over it and the later ones of its sequence. Added up in float64."""
    # Not by cumsum, which CUDA refuses in deterministic mode.
    alike = torch.ones(len(values), dtype=torch.float64, device=values.device)
    return discounted_to_go(values, sequence_of_token(offsets), alike).to(values.dtype)


def discounted_to_go(values: Tensor, sequence: Tensor, factors: Tensor) -> Tensor:
    """float64 [n]: at each entry the sum over it and later entries of its sequence, weighed by the sequence's factor to
    the power of their distance. ``sequence``: int64 [n], of each entry, contiguous. ``factors``: float64 [n], of each
    entry's sequence.
    """
    total, reach = values.double(), 1
    while reach < len(total):  # each round doubles the entries that a sum reaches over
        later = total[reach:] * (sequence[reach:] == sequence[:-reach])
        total = torch.cat([total[:-reach] + factors[:-reach] ** reach * later, total[-reach:]])
        reach *= 2
    return total


def sequence_of_token(offsets: Tensor) -> Tensor:
    """int64 [N]: the number of each token's sequence."""
    return torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff())
