"""Weights as changes since an earlier version: the difference of each changed tensor, compressed.

``xor``: the bits that differ, the first bytes of all elements together, then the second, ...; after a small step most
exponents are the same, so long runs are zero. ``overwrite``: which elements differ, and their new values; smaller if
few do. Both are exact.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from miles_async.arguments.weights import DeltaEncoding

Bytes = npt.NDArray[np.uint8]

_LEVEL = 1  # higher levels take several times as long and save a few percent


class ChangedTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a delta file, which is a MessagePack list of these."""

    name: str
    itemsize: int
    encoding: DeltaEncoding
    data: bytes


def encode(name: str, old: Bytes, new: Bytes, itemsize: int, encoding: DeltaEncoding) -> ChangedTensor | None:
    """Encode ``new`` relative to ``old``, each the bytes of all elements; None if they are equal."""
    difference = old ^ new
    if not difference.any():
        return None
    if encoding == "xor":
        parts: list[Bytes] = [difference.reshape(-1, itemsize).T]
    else:
        changed = difference.reshape(-1, itemsize).any(axis=1)
        parts = [np.packbits(changed), new.reshape(-1, itemsize)[changed]]
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    data = compressor.compress(b"".join(np.ascontiguousarray(part).data.cast("B") for part in parts))
    return ChangedTensor(name, itemsize, encoding, data)


def decode(changed: ChangedTensor, old: Bytes) -> Bytes:
    """Return the new bytes.

    If ``old`` is not what the change was encoded against, they are wrong and no error is raised: compare their digest.
    """
    itemsize, elements = changed.itemsize, len(old) // changed.itemsize
    data = np.frombuffer(zstandard.ZstdDecompressor().decompress(changed.data), np.uint8)
    if changed.encoding == "xor":
        return old ^ np.ascontiguousarray(data.reshape(itemsize, elements).T).reshape(-1)
    mask_bytes = -(-elements // 8)
    mask = np.unpackbits(data[:mask_bytes], count=elements).astype(bool)
    new = old.copy()
    new.reshape(elements, itemsize)[mask] = data[mask_bytes:].reshape(-1, itemsize)
    return new
