"""A digest of a tensor that can be taken in pieces: of the whole where it is exported, of shards where it is held.

    Σ bits(x_i) · w(i)  mod 2^64,    w(i) = c(i mod BLOCK) · (2 ⌊i / BLOCK⌋ + 1)

over its elements; i is an element's place in the whole tensor, row by row, and c are BLOCK fixed pseudo-random odd
numbers. This is multilinear hashing (Carter and Wegman, 1979; Dietzfelbinger, 1996). Every w(i) is odd, so one wrong
element always changes the sum, whatever its bits; several wrong ones, or right ones in wrong places, leave it the same
with a probability of about 2^-63. Digests of pieces add up to that of the whole. It is no defence against somebody who
wants it to collide.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

BLOCK = 1 << 14  # products of a block fit a core's cache
MODULUS = 1 << 64

_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def _multipliers() -> npt.NDArray[np.int64]:
    """SplitMix64 (Steele, Lea and Flood, 2014), made odd."""
    z = np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


MULTIPLIERS = _multipliers()


def digest(data: npt.NDArray[np.uint8], itemsize: int) -> str:
    """Of a whole tensor. ``data``: its bytes, row by row; ``itemsize``: bytes per element."""
    bits = data.view(_INTEGERS[itemsize])
    result = 0
    for block, start in enumerate(range(0, len(bits), BLOCK)):
        values = bits[start : start + BLOCK].astype(np.int64)
        result += int(np.dot(values, MULTIPLIERS[: len(values)])) * (2 * block + 1)
    return to_text(result)


def total(digests: Iterable[str]) -> str:
    """Of a tensor from those of its pieces."""
    return to_text(sum(int(piece, 16) for piece in digests))


def to_text(sum_of_products: int) -> str:
    """How a digest is written, in manifests and by engines."""
    return f"{sum_of_products % MODULUS:016x}"
