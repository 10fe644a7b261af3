"""Tensor digests that add up: of the whole tensor where it is exported, of its shards where engines hold them.

A tensor's rows are padded with zeros to 64-bit words, little-endian. With x(i, j) the j-th word of row i,

    digest = Σ row(i) · word(j) · (x(i, j) + ⌊x(i, j) / 2^32⌋)    mod 2^64

where row and word are two fixed sequences of pseudo-random odd numbers. This is multilinear hashing (Carter and Wegman,
1979; Dietzfelbinger, 1996) with multipliers that factor, so that a block of rows or of columns needs two short tables
and no number per element. The second term brings a word's upper half down, which would otherwise reach the upper half
of the sum alone. All factors are odd: a single wrong element of at most 32 bits always changes the sum, and so do two
of a word that changed places (but for float32's -0.0 and the NaN 0x7fffffff). Any other error leaves it the same with a
probability of about 2^-48 (two elements in the upper half of their words that changed places) to 2^-63. Digests of
pieces add up to the whole's, if each piece has whole words. It is no defence against deliberate collisions.

A row is the tensor's last dimension: (2, 3, 4) has 6 rows of 4 elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

WORD = 8  # bytes
HALF = 32  # bits of half a word
MODULUS = 1 << 64

_CACHED_WORDS = 1 << 16  # 512 KiB at a time: they stay in a core's cache from one step to the next
_ROW_SEED = 0x9E3779B97F4A7C15
_WORD_SEED = 0xD1B54A32D192ED03

Words = npt.NDArray[np.int64]


def row_multipliers(first: int, count: int) -> Words:
    """Multipliers of rows ``first`` .. ``first + count``."""
    return _multipliers(_ROW_SEED, _power_of_two(first + count))[first : first + count]


def word_multipliers(first: int, count: int) -> Words:
    """Multipliers of words ``first`` .. ``first + count`` of any row."""
    return _multipliers(_WORD_SEED, _power_of_two(first + count))[first : first + count]


def words_digest(words: Words, of_rows: Words, of_words: Words) -> int:
    """Share of a tensor's digest that the block ``words`` [rows, words per row] contributes; the multipliers of its
    rows and words.

    int64 arithmetic wraps: the result is right mod 2^64.
    """
    width = words.shape[1]
    if width > _CACHED_WORDS:
        starts = range(0, width, _CACHED_WORDS)
        blocks = [slice(start, start + _CACHED_WORDS) for start in starts]
        return sum(words_digest(words[:, block], of_rows, of_words[block]) for block in blocks)
    at_once = max(1, _CACHED_WORDS // max(1, width))
    mixed = np.empty((min(at_once, len(words)), width), np.int64)
    sums = np.empty(len(words), np.int64)
    for first in range(0, len(words), at_once):
        part = words[first : first + at_once]
        target = mixed[: len(part)]
        np.right_shift(part, HALF, out=target)
        np.add(target, part, out=target)
        np.einsum("ij,j->i", target, of_words, out=sums[first : first + at_once])  # three times as fast as @
    return int(np.einsum("i,i", sums, of_rows))


def digest(data: npt.NDArray[np.uint8], itemsize: int, shape: Sequence[int]) -> str:
    """Digest of a whole tensor. ``data``: its bytes, row by row; ``itemsize``: bytes per element."""
    row_bytes = itemsize * (shape[-1] if shape else 1)
    if not data.size:
        return to_text(0)
    rows = data.reshape(math.prod(shape[:-1]), row_bytes)
    if padding := -row_bytes % WORD:
        rows = np.pad(rows, ((0, 0), (0, padding)))
    words = rows.view(np.int64)
    return to_text(words_digest(words, row_multipliers(0, len(words)), word_multipliers(0, words.shape[1])))


def total(digests: Iterable[str]) -> str:
    """Combine the digests of a tensor's pieces."""
    return to_text(sum(int(piece, 16) for piece in digests))


def to_text(sum_of_products: int) -> str:
    """Format a digest as manifests and engines write it."""
    return f"{sum_of_products % MODULUS:016x}"


@lru_cache(maxsize=64)
def _multipliers(seed: int, count: int) -> Words:
    """SplitMix64 (Steele, Lea and Flood, 2014) from ``seed``, made odd."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


def _power_of_two(count: int) -> int:
    """Round up to a power of two, so that few tables serve all sizes."""
    return 1 << max(count - 1, 0).bit_length()
