"""Serialize the records of ``types``, arrays included: msgpack, in files one length-prefixed frame each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, get_args

import msgspec
import numpy as np

LENGTH_BYTES = 8

UNSAVABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors of :func:`encode` for values that are not plain data, or are nested too deeply."""


def encode(record: object) -> bytes:
    """msgpack; one-dimensional arrays as their bytes, others with dtype and shape.

    Raises:
        TypeError: the record holds something else than plain data and arrays; names its type.
        ValueError, OverflowError, RecursionError: half a surrogate pair, an integer beyond 64 bits, a circle.
    """
    return msgspec.msgpack.encode(record, enc_hook=_plain)


def decode[T](content: bytes, record_type: type[T]) -> T:
    """Decode what :func:`encode` returned; arrays are read-only. Raises msgspec.MsgspecError."""
    try:
        return msgspec.msgpack.decode(content, type=record_type, dec_hook=_array)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error


def write_frames(file: BinaryIO, records: Iterable[object]) -> None:
    """Append one frame per record, holding one record in memory at a time."""
    for record in records:
        content = encode(record)
        file.write(len(content).to_bytes(LENGTH_BYTES, "little"))
        file.write(content)


def read_frames[T](file: BinaryIO, record_type: type[T]) -> Iterator[T]:
    """Iterate over the records of a file. Raises EOFError if the last frame is cut off, msgspec.MsgspecError."""
    while prefix := file.read(LENGTH_BYTES):
        length = int.from_bytes(prefix, "little")
        content = file.read(length)
        if len(prefix) < LENGTH_BYTES or len(content) < length:
            raise EOFError(f"expected a frame of {length} bytes, found {len(content)}")
        yield decode(content, record_type)


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.ndim == 1 else (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):  # in a user's metadata
        return value.item()
    raise TypeError(f"expected plain data in a record, found {type(value).__name__}")


def _array(array_type: object, content: bytes | tuple[str, Sequence[int], bytes]) -> np.ndarray:
    """``array_type``: an alias such as ``types.Int32``."""
    if isinstance(content, bytes):
        (dtype,) = get_args(get_args(array_type)[1])
        return np.frombuffer(content, dtype=dtype)
    name, shape, values = content
    return np.frombuffer(values, dtype=name).reshape(shape)
