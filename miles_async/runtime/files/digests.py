"""Digests of large files: computed while they are written, and later from pieces that many readers share.

The digest of a file is XXH3-128 of the XXH3-128 digests of its pieces of ``PIECE_BYTES``. It finds damage, and is no
defence against deliberate collisions.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xxhash import xxh3_128

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PIECE_BYTES = 64 * 2**20
_BUFFER_BYTES = 2**20
_READERS = 4  # threads of a process: neither reading nor hashing holds the interpreter's lock


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a file that one reader digests."""

    name: str  # path of the file below a directory
    start: int  # bytes


class DigestedFile(io.BufferedWriter):
    """A new file that is written from start to end, and digested on the way."""

    def __init__(self, path: Path) -> None:
        self._raw = _DigestedRaw(path, "wb")
        super().__init__(self._raw, _BUFFER_BYTES)

    def finish(self) -> str:
        """Sync the file to disk. Return its digest. Raises OSError."""
        self.flush()
        os.fsync(self.fileno())
        return self._raw.digest()


def write_digested(path: Path, content: bytes) -> str:
    """Write a file and sync it to disk. Return its digest. Raises OSError."""
    with DigestedFile(path) as file:
        file.write(content)
        return file.finish()


def digest_file(path: Path) -> str:
    """Digest of a file on disk. Raises OSError."""
    return digest_pieces(path.parent, split({path.name: path.stat().st_size}))[path.name]


def digest_pieces(directory: Path, pieces: Sequence[Piece]) -> dict[str, str]:
    """Digests of whole files from ``pieces``, all their pieces in order. Raises OSError."""
    return joined(pieces, read_pieces(directory, pieces))


def split(sizes: Mapping[str, int]) -> list[Piece]:
    """Pieces of files. ``sizes``: bytes by name. An empty file has one piece."""
    return [Piece(name, start) for name, size in sizes.items() for start in range(0, max(size, 1), PIECE_BYTES)]


def read_pieces(directory: Path, pieces: Sequence[Piece]) -> list[bytes]:
    """Digest of each piece, several read at a time. Raises OSError."""
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(lambda piece: _read(directory / piece.name, piece.start), pieces))


def joined(pieces: Iterable[Piece], digests: Iterable[bytes]) -> dict[str, str]:
    """Combine the digests of all pieces into digests of files."""
    files: dict[str, list[bytes]] = {}
    for piece, digest in zip(pieces, digests, strict=True):
        files.setdefault(piece.name, []).append(digest)
    return {name: _of_file(of_pieces) for name, of_pieces in files.items()}


def _of_file(of_pieces: Iterable[bytes]) -> str:
    return xxh3_128(b"".join(of_pieces)).hexdigest()


def _read(path: Path, start: int) -> bytes:
    digest, buffer = xxh3_128(), memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = PIECE_BYTES
        while left and (count := file.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


class _DigestedRaw(io.FileIO):
    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._whole: list[bytes] = []  # digests of the pieces that are complete
        self._piece, self._left = xxh3_128(), PIECE_BYTES

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        written = super().write(view)
        left = view[:written]
        while left:
            if not self._left:  # and more comes
                self._whole.append(self._piece.digest())
                self._piece, self._left = xxh3_128(), PIECE_BYTES
            part, left = left[: self._left], left[self._left :]
            self._piece.update(part)
            self._left -= len(part)
        return written

    def digest(self) -> str:
        return _of_file([*self._whole, self._piece.digest()])
