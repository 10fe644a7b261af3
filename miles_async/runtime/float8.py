"""Weights in float8 as floats, where files are read and where a CPU computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def dequantized(values: Tensor, scales: Tensor, block: Sequence[int]) -> Tensor:
    """fp32 [..., M, N] of float8 [..., M, N] and a scale per block of ``block`` rows and columns."""
    scales = scales.float()
    for dimension, size in zip((-2, -1), block, strict=True):
        scales = scales.repeat_interleave(size, dimension).narrow(dimension, 0, values.shape[dimension])
    return values.float() * scales
