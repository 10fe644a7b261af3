"""Random access to the rows of a prompt file, without holding them as Python objects.

A JSONL file stays on disk behind an index of line starts; of a Parquet file the needed columns are held as
Arrow arrays. Both are opened once: replacing the file during the run does not change what the run reads.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np

from miles_async.arguments.data import DataArguments, split_slice
from miles_async.errors import DataError
from miles_async.prompts.keys import holder, may_lack, root
from miles_async.runtime.nesting import DEEPEST, too_deep
from miles_async.types import Int64, JsonObject

if TYPE_CHECKING:
    import pyarrow

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RowFile(ABC):
    """Rows by index in [0, len)."""

    path: Path
    digest: str  # of the whole file, to recognize it on resume

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> JsonObject:
        """Raises DataError beginning with the location when the row is malformed."""

    def number(self, index: int) -> int:
        """1-based number of the row in the file, for people: its line in JSONL."""
        return index + 1

    def location(self, index: int) -> str:
        """``path:number``, the beginning of every message about this row."""
        return f"{self.path}:{self.number(index)}"

    def __iter__(self) -> Iterator[JsonObject]:
        return map(self.read, range(len(self)))


def open_row_file(path: Path, arguments: DataArguments) -> RowFile:
    """Open ``path`` by its suffix. Raises DataError when it is unreadable, empty or of another kind."""
    file, chosen = split_slice(path)
    try:
        match file.suffix:
            case ".jsonl":
                rows: RowFile = JsonlFile(file)
            case ".parquet":
                rows = ParquetFile(file, arguments)
            case other:
                raise DataError(f"{path}: prompt data must be .jsonl or .parquet, found {other or 'no suffix'!r}")
    except OSError as error:
        raise DataError(f"{path}: cannot read prompt data: {error.strerror or error}") from None
    if not len(rows):
        raise DataError(f"{path}: holds no prompts")
    if chosen is None:
        return rows
    part = RowSlice(rows, chosen)
    if not len(part):
        raise DataError(f"{path}: holds no prompts, the file has {len(rows)} rows")
    return part


def _keys(arguments: DataArguments) -> dict[str, str]:
    """Flag → the key that it names."""
    keys = {
        "--input-key": arguments.input_key,
        "--label-key": arguments.label_key,
        "--metadata-key": arguments.metadata_key,
        "--tool-key": arguments.tool_key,
        "--prompt-id-key": arguments.prompt_id_key,
    }
    return {flag: key for flag, key in keys.items() if key is not None}


def file_digest(path: Path) -> str:
    """blake2b of the content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class JsonlFile(RowFile):
    """One JSON object per line; lines of white space are skipped but counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(JsonObject)
        with path.open("rb") as file:
            self._starts, self._ends, self._numbers, self.digest = _index_lines(file)
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return len(self._starts)

    def number(self, index: int) -> int:
        return int(self._numbers[index])

    def read(self, index: int) -> JsonObject:
        start, end = int(self._starts[index]), int(self._ends[index])
        return self._decode(os.pread(self._descriptor, end - start, start), index)

    def _decode(self, line: bytes, index: int) -> JsonObject:
        try:
            row = self._decoder.decode(line)
            if line.count(b"[") + line.count(b"{") > DEEPEST and too_deep(row):  # few have as many brackets
                raise RecursionError
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


class ParquetFile(RowFile):
    """The needed columns of a Parquet file, read row group by row group into Arrow memory.

    An object in it has the fields of all objects of its column, null where the row had none. In what a chat template
    renders, messages and tools, null fields are left out.
    """

    def __init__(self, path: Path, arguments: DataArguments) -> None:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        self.path = path
        self.digest = file_digest(path)
        rendered = (arguments.input_key, arguments.tool_key, f"{arguments.metadata_key}.tools")
        self._rendered = [key for key in rendered if key is not None]
        try:
            with parquet.ParquetFile(path) as file:
                schema = file.schema_arrow
                columns = {
                    root(schema, key, f"{path}: no column {key!r} ({flag})")
                    for flag, key in _keys(arguments).items()
                    if key in schema.names or not may_lack(flag, key)
                }
                groups = [file.read_row_group(i, columns=sorted(columns)) for i in range(file.num_row_groups)]
        except arrow.ArrowException as error:
            raise DataError(f"{path}: not a readable Parquet file: {error}") from None
        if arguments.label_key is not None:
            column = root(schema, arguments.label_key, "")
            groups = [_with_short_floats(group, column) for group in groups]
        self._batches = [batch for group in groups for batch in group.to_batches()]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int) -> JsonObject:
        batch = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[batch]) - self._batches[batch].num_rows
        return self._row(self._batches[batch].slice(index - first, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[JsonObject]:
        for batch in self._batches:
            for start in range(0, batch.num_rows, 1024):
                yield from map(self._row, batch.slice(start, 1024).to_pylist())

    def _row(self, row: dict[str, Any]) -> JsonObject:
        for key in self._rendered:
            with suppress(KeyError):
                inner, name = holder(row, key)
                inner[name] = _without_nulls(inner[name])
        return row


class RowSlice(RowFile):
    """Some consecutive rows of a file, which keep their numbers."""

    def __init__(self, rows: RowFile, chosen: slice) -> None:
        self._rows = rows
        self._indices = range(len(rows))[chosen]
        self.path = rows.path
        self.digest = f"{rows.digest}[{self._indices.start}:{self._indices.stop}]"

    def __len__(self) -> int:
        return len(self._indices)

    def number(self, index: int) -> int:
        return self._rows.number(self._indices[index])

    def read(self, index: int) -> JsonObject:
        return self._rows.read(self._indices[index])


def _without_nulls(value: object) -> object:
    """Drop null fields of objects, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _with_short_floats(table: pyarrow.Table, column: str) -> pyarrow.Table:
    """Turn float32, in lists and objects too, to the float64 with the same shortest text: 0.1, not 0.10000000149."""
    import pyarrow as arrow

    index = table.schema.get_field_index(column)
    texts, floats = (_without_float32(table.schema.field(index).type, to) for to in (arrow.string(), arrow.float64()))
    if floats == table.schema.field(index).type:
        return table
    return table.set_column(index, column, table.column(index).cast(texts).cast(floats))


def _without_float32(kind: pyarrow.DataType, replacement: pyarrow.DataType) -> pyarrow.DataType:
    import pyarrow as arrow

    if kind == arrow.float32():
        return replacement
    if arrow.types.is_struct(kind):
        return arrow.struct([field.with_type(_without_float32(field.type, replacement)) for field in kind])
    if arrow.types.is_list(kind):
        return arrow.list_(kind.value_field.with_type(_without_float32(kind.value_type, replacement)))
    return kind
