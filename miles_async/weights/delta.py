"""Weights as changes since an earlier version: which elements of each changed tensor differ, and how, compressed.

``xor``: the bits that differ; ``overwrite``: the new elements. Both are exact. For every block of elements come a mask
of the kept ones, then the first bytes of all kept ones together, then the second, ...; each of these planes is
again a mask, of the bytes that are kept, and these bytes. Zeros are not kept: after a small step, most bits that
differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from miles_async.arguments.weights import DeltaEncoding

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger]
"""The bits of elements, one unsigned integer each."""
Mask = npt.NDArray[np.bool_]

W = TypeVar("W", bound=np.unsignedinteger)

# Zeros are gone, so there is little to match: a small table halves zstd's time.
_COMPRESSION = zstandard.ZstdCompressionParameters.from_level(1, hash_log=8)
_BLOCK = 1 << 18  # elements: intermediate results stay in the cache
_MOSTLY = 0.6  # above this share everything is kept, which is faster and no larger


class ChangedTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a delta file, which is a MessagePack list of these."""

    name: str
    itemsize: int
    encoding: DeltaEncoding
    data: bytes


def encode(name: str, old: Bytes, new: Bytes, itemsize: int, encoding: DeltaEncoding) -> ChangedTensor | None:
    """Encode ``new`` relative to ``old``, each the bytes of all elements; None if they are equal."""
    before, after = _words(old, itemsize), _words(new, itemsize)
    if all(np.array_equal(before[block], after[block]) for block in _blocks(before)):
        return None
    compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION)
    data = b"".join(compressor.compress(part.data) for part in _parts(before, after, encoding))
    return ChangedTensor(name, itemsize, encoding, data)


def apply(changed: ChangedTensor, content: Bytes) -> None:
    """Change the old bytes into the new ones, in place.

    If ``content`` is not what the change was encoded against, the result is wrong and no error is raised: compare its
    digest.
    """
    parts = _Parts(changed.data)
    words = _words(content, changed.itemsize)
    for block in _blocks(words):
        kept = parts.mask(block.stop - block.start)
        values = parts.words(int(np.count_nonzero(kept)), words.dtype)
        if len(values) == len(kept):
            where: slice | npt.NDArray[np.intp] = block
        else:
            where = block.start + np.flatnonzero(kept)
        if changed.encoding == "xor":
            words[where] ^= values
        else:
            words[where] = values


def _parts(before: Words, after: Words, encoding: DeltaEncoding) -> Iterator[Bytes]:
    for block in _blocks(before):
        difference = before[block] ^ after[block]
        kept = _not_zero(difference)
        yield np.packbits(kept)
        words = _select(kept, difference if encoding == "xor" else after[block])
        for byte in range(before.itemsize):
            plane = (words >> 8 * byte).astype(np.uint8)
            kept = _not_zero(plane)
            yield np.packbits(kept)
            yield _select(kept, plane)


class _Parts:
    """Reads the output of :func:`_parts`, in the same order."""

    def __init__(self, data: bytes) -> None:
        decompressor = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
        self._data = np.frombuffer(decompressor.decompress(data), np.uint8)
        self._position = 0

    def mask(self, count: int) -> Mask:
        return np.unpackbits(self._take(-(-count // 8)), count=count).view(np.bool_)

    def words(self, count: int, dtype: np.dtype[W]) -> npt.NDArray[W]:
        words = np.zeros(count, dtype)
        for byte in range(dtype.itemsize):
            words |= np.left_shift(self._plane(count), 8 * byte, dtype=dtype)
        return words

    def _plane(self, count: int) -> Bytes:
        kept = self.mask(count)
        values = self._take(int(np.count_nonzero(kept)))
        if len(values) == count:
            return values
        plane = np.zeros(count, np.uint8)
        plane[np.flatnonzero(kept)] = values
        return plane

    def _take(self, count: int) -> Bytes:
        start, self._position = self._position, self._position + count
        return self._data[start : self._position]


def _not_zero(words: npt.NDArray[W]) -> Mask:
    """Indices of the elements that are not zero; all if most are not."""
    mask = words != 0
    if np.count_nonzero(mask) > _MOSTLY * len(mask):
        mask[:] = True
    return mask


def _select(kept: Mask, words: npt.NDArray[W]) -> npt.NDArray[W]:
    return words if kept.all() else np.compress(kept, words)  # which is faster than words[kept]


def _words(data: Bytes, itemsize: int) -> Words:
    return data.view(f"u{itemsize}")


def _blocks(words: Words) -> Iterator[slice]:
    for start in range(0, len(words), _BLOCK):
        yield slice(start, min(start + _BLOCK, len(words)))
