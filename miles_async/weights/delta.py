"""Weights as changes since an earlier version: the difference of each changed tensor, compressed.

``xor``: the bits that differ; in every block of elements the first bytes of all of them together, then the second, ...;
after a small step most exponents are the same, so long runs are zero. ``overwrite``: which elements differ, and their
new values; smaller if few do. Both are exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from miles_async.arguments.weights import DeltaEncoding

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger]
"""The bits of elements, one unsigned integer each."""

_LEVEL = 1  # higher levels take several times as long and save a few percent
_BLOCK = 1 << 17  # elements: what is computed of them stays in the cache, and a byte of each is a block of zstd's


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
    parts = _differing_bits(before, after) if encoding == "xor" else _new_values(before, after)
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
    data = b"".join([*(compressor.compress(part.data) for part in parts), compressor.flush()])
    return ChangedTensor(name, itemsize, encoding, data)


def apply(changed: ChangedTensor, content: Bytes) -> None:
    """Change the old bytes into the new ones, in place.

    If ``content`` is not what the change was encoded against, the result is wrong and no error is raised: compare its
    digest.
    """
    data = np.frombuffer(zstandard.ZstdDecompressor().decompressobj().decompress(changed.data), np.uint8)
    words = _words(content, changed.itemsize)
    if changed.encoding == "xor":
        _flip(words, data)
    else:
        _overwrite(words, data)


def _differing_bits(before: Words, after: Words) -> Iterator[Bytes]:
    """Bytes of all elements of a block, by significance. Each is valid until the next one is asked for."""
    difference, plane = np.empty(_BLOCK, before.dtype), np.empty(_BLOCK, np.uint8)
    for block in _blocks(before):
        bits = np.bitwise_xor(before[block], after[block], out=difference[: block.stop - block.start])
        for _ in range(before.itemsize):
            np.copyto(plane[: len(bits)], bits, casting="unsafe")  # the lowest byte
            yield plane[: len(bits)]
            if before.itemsize > 1:
                np.right_shift(bits, 8, out=bits)


def _flip(words: Words, data: Bytes) -> None:
    """Undo :func:`_differing_bits`."""
    room = np.empty(_BLOCK, words.dtype)
    start = 0
    for block in _blocks(words):
        elements = block.stop - block.start
        bits = room[:elements]
        for byte in range(words.itemsize):
            np.copyto(bits, data[start : start + elements])
            words[block] ^= np.left_shift(bits, 8 * byte, out=bits) if byte else bits
            start += elements


def _new_values(before: Words, after: Words) -> Iterator[Bytes]:
    """A bit per element, then the values of those that differ."""
    for block in _blocks(before):
        yield np.packbits(before[block] != after[block])
    for block in _blocks(before):
        yield after[block][before[block] != after[block]].view(np.uint8)


def _overwrite(words: Words, data: Bytes) -> None:
    """Undo :func:`_new_values`."""
    mask_bytes = -(-len(words) // 8)
    values = data[mask_bytes:].view(words.dtype)
    start = 0
    for block in _blocks(words):
        elements = block.stop - block.start
        differs = np.unpackbits(data[block.start // 8 : -(-block.stop // 8)], count=elements).astype(bool)
        count = int(np.count_nonzero(differs))
        words[block][differs] = values[start : start + count]
        start += count


def _words(data: Bytes, itemsize: int) -> Words:
    return data.view(f"u{itemsize}")


def _blocks(words: Words) -> Iterator[slice]:
    for start in range(0, len(words), _BLOCK):
        yield slice(start, min(start + _BLOCK, len(words)))
