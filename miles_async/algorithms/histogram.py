"""Quantiles from counts on a logarithmic scale, which can be summed over micro-batches and ranks.

Bins grow by a factor of 1.1 from 1e-6 to 50, so a quantile is right within 5 %; smaller values count as 0, larger ones
as 50. Counts are integers, so neither packing nor the layout of ranks changes a quantile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST, GROWTH, BINS = 1e-6, 1.1, 187
EDGES = tuple(SMALLEST * GROWTH**power for power in range(BINS))
MIDDLES = (0.0, *(edge / math.sqrt(GROWTH) for edge in EDGES[1:]), EDGES[-1])
SIGNED_MIDDLES = (*(-middle for middle in reversed(MIDDLES[1:])), *MIDDLES)


def magnitudes(values: Tensor, mask: Tensor, groups: Tensor, count: int) -> Tensor:
    """float64 [count, BINS + 1]: number of masked-in values by group and bin of magnitude.

    ``values``, ``mask``, ``groups``: each [N], the last in [0, count).
    """
    bins = torch.bucketize(values.abs().double(), _edges(values.device, signed=False))
    return _counted(groups * len(MIDDLES) + bins, mask, count * len(MIDDLES)).view(count, -1)


def signed(values: Tensor, mask: Tensor) -> Tensor:
    """float64 [2 · BINS + 1]: number of masked-in values in each bin, from the most negative."""
    bins = torch.bucketize(values.double(), _edges(values.device, signed=True))
    return _counted(bins, mask, len(SIGNED_MIDDLES))


def quantile(counts: Sequence[float], share: float, middles: Sequence[float] = MIDDLES) -> float:
    """The value that ``share`` of the counts does not exceed; 0 without counts.

    >>> quantile([98.0, 0.0, 2.0], 0.99, (0.0, 1.0, 2.0))
    2.0
    """
    below, needed = 0.0, share * sum(counts)
    for count, middle in zip(counts, middles, strict=True):
        below += count
        if count and below >= needed:
            return middle
    return 0.0


def _counted(bins: Tensor, mask: Tensor, count: int) -> Tensor:
    # No bincount: on a GPU it would wait for the device.
    return torch.zeros(count, dtype=torch.float64, device=bins.device).index_add(0, bins, mask.double())


@functools.cache
def _edges(device: torch.device, *, signed: bool) -> Tensor:
    edges = (*(-edge for edge in reversed(EDGES)), *EDGES) if signed else EDGES
    return torch.tensor(edges, dtype=torch.float64, device=device)
