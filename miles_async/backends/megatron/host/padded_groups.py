"""Packed sequences as right-padded batches, for attention kernels without support for packing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedGroup:
    """A batch of sequences of similar length: indices of its queries' and keys' tokens, int64."""

    queries: Tensor  # [b, q]
    valid: Tensor  # bool [b, q]: False for padding
    keys: Tensor  # [b, k]
    depths: Tensor | None = None  # int64 [b, q]: position of each query among the k tokens; None: in order


def padded_groups(cu_seqlens: Tensor, own: Tensor | None = None) -> Iterator[PaddedGroup]:
    """Group sequences by the next powers of two of their lengths, so that there are few attention calls and at most
    half of a batch is padding. Padding is on the right, where causal attention never looks.

    Args:
        cu_seqlens: int [S + 1], boundaries of the sequences.
        own: int64 [S], number of tokens at the end of each sequence that have queries; None: all.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    queries = lengths if own is None else own
    buckets = torch.where(queries > 0, 64 * _doublings(queries) + _doublings(lengths), -1)
    for bucket in buckets.unique().tolist():
        if bucket < 0:
            continue
        chosen = buckets == bucket
        start, length, count = starts[chosen, None], lengths[chosen, None], queries[chosen, None]
        key = torch.arange(int(length.max()), device=cu_seqlens.device)
        keys = start + key.minimum(length - 1)
        if own is None:
            yield PaddedGroup(queries=keys, valid=key < length, keys=keys)
            continue
        query = torch.arange(int(count.max()), device=cu_seqlens.device)
        depths = length - count + query.minimum(count - 1)
        yield PaddedGroup(queries=start + depths, valid=query < count, keys=keys, depths=depths)


def each_alone(compute: Callable[..., Tensor], parts: Sequence[Tensor], cu_seqlens: Tensor, *, like: Tensor) -> Tensor:
    """Apply a recurrence over batches of sequences, [b, n, ...], to the packed sequences of ``parts``, [T, ...].

    Padding is on the right, where it never looks. ``like``: [T, ...], the shape and dtype of the result.
    """
    out = torch.zeros_like(like)
    for group in padded_groups(cu_seqlens):
        found = compute(*(part[group.keys] for part in parts))
        out = out.index_put((group.keys[group.valid],), found[group.valid])
    return out


def _doublings(lengths: Tensor) -> Tensor:
    return lengths.float().log2().ceil().long()
