"""Random access to the rows of one prompt file, without holding them as Python objects.

A JSONL file stays on disk behind an index of line starts, a compressed one as an unpacked copy without a name; tables
are in ``prompts.tables``. Files are opened once: replacing one during the run does not change what the run reads.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, BinaryIO, cast

import msgspec
import numpy as np

from miles_async.arguments.data import DataArguments
from miles_async.errors import DataError
from miles_async.prompts.layouts import Layout
from miles_async.runtime.nesting import DEEPEST, too_deep, too_large
from miles_async.types import Int64, JsonObject

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MANY_DIGITS = re.compile(rb"\d{19}")


class RowFile(ABC):
    """Rows by index in [0, len)."""

    place: str  # as messages name it
    label: str  # the beginning of its prompts' ids, unless a column has them
    digest: str  # of the whole content, to recognize it on resume
    keys: DataArguments  # with the keys of its columns
    layout: Layout | None = None  # of another project
    revision: str | None = None  # commit of a data set of the hub
    is_json = True  # values of rows have no other types

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def raw(self, index: int) -> JsonObject:
        """The row as it is in the file. Raises DataError beginning with the location when it is malformed."""

    def raws(self) -> Iterator[JsonObject]:
        return map(self.raw, range(len(self)))

    def number(self, index: int) -> int:
        """1-based number of the row in the file, for people: its line in JSONL."""
        return index + 1

    def index(self, number: int) -> int | None:
        """The inverse of :meth:`number`; None if no row has it."""
        return number - 1 if 1 <= number <= len(self) else None

    def location(self, index: int) -> str:
        """``path:number``, the beginning of every message about this row."""
        return f"{self.place}:{self.number(index)}"

    def read(self, index: int) -> JsonObject:
        """The row with the columns of :attr:`keys`. Raises DataError beginning with the location."""
        return self._converted(self.raw(index), index)

    def __iter__(self) -> Iterator[JsonObject]:
        return (self._converted(row, index) for index, row in enumerate(self.raws()))

    def use(self, layout: Layout | None, arguments: DataArguments) -> None:
        """Read columns as flags name them, or as the layout has them."""
        self.layout = layout
        self.keys = layout.keys(arguments) if layout is not None else arguments

    def _converted(self, row: JsonObject, index: int) -> JsonObject:
        convert = None if self.layout is None else self.layout.convert
        return row if convert is None else convert(row, self.location(index))


def file_digest(*paths: Path) -> str:
    """blake2b of the content, hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


class JsonlFile(RowFile):
    """One JSON object per line; lines of white space are skipped but counted. ``.gz`` and ``.zst`` are unpacked."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, also for broken compression."""
        self.place, self.label = str(path), path.name
        self._decoder = msgspec.json.Decoder(JsonObject)
        with ExitStack() as stack:
            file: BinaryIO = stack.enter_context(path.open("rb"))
            if path.suffix != ".jsonl":
                file = stack.enter_context(_unpacked(file, path.suffix))
            self._starts, self._ends, self._numbers, self.digest = _index_lines(file)
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return len(self._starts)

    def number(self, index: int) -> int:
        return int(self._numbers[index])

    def index(self, number: int) -> int | None:
        index = int(np.searchsorted(self._numbers, number))
        return index if index < len(self) and self._numbers[index] == number else None

    def raw(self, index: int) -> JsonObject:
        start, end = int(self._starts[index]), int(self._ends[index])
        return self._decode(os.pread(self._descriptor, end - start, start), index)

    def _decode(self, line: bytes, index: int) -> JsonObject:
        try:
            row = self._decoder.decode(line)
            if line.count(b"[") + line.count(b"{") > DEEPEST and too_deep(row):  # few have as many brackets
                raise RecursionError
            if _MANY_DIGITS.search(line) and too_large(row):
                raise DataError(f"{self.location(index)}: it has an integer beyond 64 bits; write it as a text")
        except RecursionError:
            raise DataError(f"{self.location(index)}: expected JSON of at most {DEEPEST} nested levels") from None
        except msgspec.ValidationError as error:
            raise DataError(f"{self.location(index)}: a row must be a JSON object: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            shown = line.decode("utf-8", "replace").strip()
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise DataError(f"{self.location(index)}: not valid JSON: {error}: {shown}") from None
        return row


def _index_lines(file: BinaryIO) -> tuple[Int64, Int64, Int64, str]:
    """Byte ranges [start, end) and 1-based numbers of the lines that hold a row; the digest of the file."""
    digest = hashlib.blake2b(digest_size=16)
    rows: list[tuple[int, int, int]] = []
    position = 0
    for number, line in enumerate(file, start=1):
        digest.update(line)
        content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        position += len(line)
        if not content.isspace() and content:
            rows.append((position - len(content), position, number))
    starts, ends, numbers = np.asarray(rows, np.int64).reshape(-1, 3).T
    return starts, ends, numbers, digest.hexdigest()


def _unpacked(file: IO[bytes], suffix: str) -> BinaryIO:
    """A file without a name, in the directory for temporary ones, with the content. Raises OSError."""
    import pyarrow

    unpacked = tempfile.TemporaryFile()
    try:
        with pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), _CODECS[suffix]) as stream:
            while piece := stream.read(1 << 20):
                unpacked.write(piece)
    except BaseException:
        unpacked.close()
        raise
    unpacked.seek(0)
    return cast(BinaryIO, unpacked)


_CODECS = {".gz": "gzip", ".zst": "zstd"}


class RowSlice(RowFile):
    """Some consecutive rows of a file, which keep their numbers."""

    def __init__(self, rows: RowFile, chosen: slice) -> None:
        self._rows = rows
        self._indices = range(len(rows))[chosen]
        self.place, self.label, self.revision = rows.place, rows.label, rows.revision
        self.digest = f"{rows.digest}[{self._indices.start}:{self._indices.stop}]"
        self.layout, self.keys, self.is_json = rows.layout, rows.keys, rows.is_json

    def __len__(self) -> int:
        return len(self._indices)

    def number(self, index: int) -> int:
        return self._rows.number(self._indices[index])

    def index(self, number: int) -> int | None:
        inside = self._rows.index(number)
        return self._indices.index(inside) if inside is not None and inside in self._indices else None

    def raw(self, index: int) -> JsonObject:
        return self._rows.raw(self._indices[index])
