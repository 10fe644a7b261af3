"""Random access to the rows of a prompt file, without holding them as Python objects.

A JSONL file stays on disk behind an index of line starts; of a Parquet file the needed columns are held as
Arrow arrays. Both are opened once: replacing the file during the run does not change what the run reads.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec
import numpy as np

from miles_async.arguments.data import DataArguments
from miles_async.errors import DataError
from miles_async.types import Int64, JsonObject

if TYPE_CHECKING:
    import pyarrow

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RowFile(Protocol):
    """Rows by index in [0, len)."""

    path: Path
    digest: str  # of the whole file, to recognize it on resume

    def __len__(self) -> int: ...

    def number(self, index: int) -> int:
        """1-based number of the row in the file, for people: its line in JSONL."""
        ...

    def location(self, index: int) -> str:
        """``path:number``, the beginning of every message about this row."""
        ...

    def read(self, index: int) -> JsonObject:
        """Raises DataError beginning with the location when the row is malformed."""
        ...

    def __iter__(self) -> Iterator[JsonObject]: ...


def open_row_file(path: Path, arguments: DataArguments) -> RowFile:
    """Open ``path`` by its suffix. Raises DataError when it is unreadable, empty or of another kind."""
    try:
        match path.suffix:
            case ".jsonl":
                rows: RowFile = JsonlFile(path)
            case ".parquet":
                rows = ParquetFile(path, arguments)
            case other:
                raise DataError(f"{path}: prompt data must be .jsonl or .parquet, found {other or 'no suffix'!r}")
    except OSError as error:
        raise DataError(f"{path}: cannot read prompt data: {error.strerror or error}") from None
    if not len(rows):
        raise DataError(f"{path}: holds no prompts")
    return rows


def _columns(arguments: DataArguments) -> dict[str, str]:
    """Column → the flag that names it."""
    keys = {
        "--input-key": arguments.input_key,
        "--label-key": arguments.label_key,
        "--metadata-key": arguments.metadata_key,
        "--prompt-id-key": arguments.prompt_id_key,
    }
    return {key: flag for flag, key in keys.items() if key is not None}


def file_digest(path: Path) -> str:
    """blake2b of the content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class JsonlFile:
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

    def location(self, index: int) -> str:
        return f"{self.path}:{self.number(index)}"

    def read(self, index: int) -> JsonObject:
        start, end = int(self._starts[index]), int(self._ends[index])
        return self._decode(os.pread(self._descriptor, end - start, start), index)

    def __iter__(self) -> Iterator[JsonObject]:
        return (self.read(index) for index in range(len(self)))

    def _decode(self, line: bytes, index: int) -> JsonObject:
        try:
            return self._decoder.decode(line)
        except msgspec.ValidationError as error:
            raise DataError(f"{self.location(index)}: a row must be a JSON object: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            shown = line.decode("utf-8", "replace").strip()
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise DataError(f"{self.location(index)}: not valid JSON: {error}: {shown}") from None


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


class ParquetFile:
    """The needed columns of a Parquet file, read row group by row group into Arrow memory.

    An object in it has the fields of all objects of its column, null where the row had none. In what a chat template
    renders, messages and tools, null fields are left out.
    """

    def __init__(self, path: Path, arguments: DataArguments) -> None:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        self.path = path
        self.digest = file_digest(path)
        self._input, self._metadata = arguments.input_key, arguments.metadata_key
        columns = _columns(arguments)
        try:
            with parquet.ParquetFile(path) as file:
                found = file.schema_arrow.names
                for column, flag in columns.items():
                    if column not in found:
                        raise DataError(f"{path}: no column {column!r} ({flag}); columns: {', '.join(found)}")
                groups = [file.read_row_group(i, columns=list(columns)) for i in range(file.num_row_groups)]
        except arrow.ArrowException as error:
            raise DataError(f"{path}: not a readable Parquet file: {error}") from None
        if arguments.label_key is not None:
            groups = [_with_short_floats(group, arguments.label_key) for group in groups]
        self._batches = [batch for group in groups for batch in group.to_batches()]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def number(self, index: int) -> int:
        return index + 1

    def location(self, index: int) -> str:
        return f"{self.path}:{self.number(index)}"

    def read(self, index: int) -> JsonObject:
        batch = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[batch]) - self._batches[batch].num_rows
        return self._row(self._batches[batch].slice(index - first, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[JsonObject]:
        for batch in self._batches:
            for start in range(0, batch.num_rows, 1024):
                yield from map(self._row, batch.slice(start, 1024).to_pylist())

    def _row(self, row: dict[str, Any]) -> JsonObject:
        row[self._input] = _without_nulls(row[self._input])
        if self._metadata is not None and isinstance(metadata := row[self._metadata], dict) and "tools" in metadata:
            metadata["tools"] = _without_nulls(metadata["tools"])
        return row


def _without_nulls(value: object) -> object:
    """Drop null fields of objects, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _with_short_floats(table: pyarrow.Table, column: str) -> pyarrow.Table:
    """Turn float32 to the float64 with the same shortest text: 0.1, not 0.10000000149011612."""
    import pyarrow as arrow

    index = table.schema.get_field_index(column)
    if table.schema.field(index).type != arrow.float32():
        return table
    return table.set_column(index, column, table.column(index).cast(arrow.string()).cast(arrow.float64()))
