"""Tables as prompt files: Parquet, and what ``datasets`` reads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_async.arguments.data import DataArguments
from miles_async.errors import DataError
from miles_async.prompts.files import RowFile, file_digest
from miles_async.prompts.image_parts import image_key
from miles_async.prompts.layouts import Layout, column_of, hint, holder, may_lack, recognize
from miles_async.types import JsonObject

if TYPE_CHECKING:
    import pyarrow


class TableRows(RowFile):
    """The needed columns of a table, as Arrow arrays.

    An object in it has the fields of all objects of its column, null where the row had none. In what a chat template
    renders, messages and tools, null fields are left out.
    """

    is_json = False

    def __init__(self, place: str, label: str, digest: str, tables: Sequence[pyarrow.Table], columns: Columns) -> None:
        """``tables``: with the columns of ``columns``, one after another."""
        self.place, self.label, self.digest = place, label, digest
        self.use(columns.layout, columns.arguments)
        rendered = (self.keys.input_key, self.keys.tool_key, f"{self.keys.metadata_key}.tools")
        more = columns.layout.rendered if columns.layout else ()
        self._rendered = [key for key in (*rendered, *more) if key is not None]
        self._label_float = None if self.keys.label_key is None else _short_float(columns.schema, self.keys.label_key)
        self._batches = [batch for table in tables for batch in table.to_batches()]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def raw(self, index: int) -> JsonObject:
        batch = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[batch]) - self._batches[batch].num_rows
        return self._row(self._batches[batch].slice(index - first, 1).to_pylist()[0])

    def raws(self) -> Iterator[JsonObject]:
        for batch in self._batches:
            for start in range(0, batch.num_rows, 1024):
                yield from map(self._row, batch.slice(start, 1024).to_pylist())

    def _row(self, row: dict[str, Any]) -> JsonObject:
        for key in self._rendered:
            with suppress(KeyError):
                inner, name = holder(row, key)
                inner[name] = _without_nulls(inner[name])
        if self._label_float is not None and self.keys.label_key is not None:
            with suppress(KeyError):  # the object that should hold it is null in this row
                inner, name = holder(row, self.keys.label_key)
                inner[name] = _shortened(inner[name], self._label_float)
        return row


class Columns:
    """The columns of a table that are needed, and whose layout they have."""

    def __init__(self, schema: pyarrow.Schema, arguments: DataArguments, place: str) -> None:
        """Raises DataError beginning with ``place``: a column is missing."""
        self.schema = schema
        self.arguments = arguments
        self.layout: Layout | None = recognize(schema.names, arguments)
        named = _named_keys(arguments)
        found = set[str]()
        if self.layout is not None:
            found |= {name for name in (*self.layout.columns, *self.layout.more) if name in schema.names}
            named = {flag: key for flag, key in named.items() if flag not in ("--input-key", "--label-key")}
        for flag, key in named.items():
            try:
                found.add(column_of(schema, key)[0])
            except KeyError as error:
                if not may_lack(flag, key):
                    there = f"columns: {error.args[0]}{hint(arguments)}"
                    raise DataError(f"{place}: no column {key!r} ({flag}); {there}") from None
        self.names = sorted(found)


def parquet_rows(path: Path, arguments: DataArguments) -> RowFile:
    """Read row group by row group into memory, with images to disk. Raises DataError, OSError."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    digest = file_digest(path)
    try:
        with parquet.ParquetFile(path) as file:
            columns = Columns(file.schema_arrow, arguments, str(path))
            groups = (file.read_row_group(i, columns=columns.names) for i in range(file.num_row_groups))
            with_images = image_key(arguments.multimodal_keys) is not None and file.num_row_groups > 0
            tables = [spooled(groups)] if with_images else list(groups)
    except arrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None
    return TableRows(str(path), path.name, digest, tables, columns)


def _named_keys(arguments: DataArguments) -> dict[str, str]:
    """Flag → the key that it names."""
    keys = {
        "--input-key": arguments.input_key,
        "--label-key": arguments.label_key,
        "--metadata-key": arguments.metadata_key,
        "--tool-key": arguments.tool_key,
        "--prompt-id-key": arguments.prompt_id_key,
        "--multimodal-keys": image_key(arguments.multimodal_keys),
    }
    return {flag: key for flag, key in keys.items() if key is not None}


def _without_nulls(value: object) -> object:
    """Drop null fields of objects, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _short_float(schema: pyarrow.Schema, key: str) -> type[np.floating] | None:
    """The float type of a column, or of its lists, if it is shorter than Python's; None if it isn't."""
    import pyarrow as arrow

    try:
        _, kind = column_of(schema, key)
    except KeyError:
        return None  # the answer of a conversation, which is text
    while arrow.types.is_list(kind) or arrow.types.is_large_list(kind) or arrow.types.is_fixed_size_list(kind):
        kind = kind.value_type
    if kind == arrow.float16():
        return np.float16
    return np.float32 if kind == arrow.float32() else None


def _shortened(value: object, kind: type[np.floating]) -> object:
    """Turn numbers of ``kind`` into those with the same shortest text: 0.1, not 0.10000000149 or 0.0999755859375."""
    if isinstance(value, list):
        return [_shortened(item, kind) for item in value]
    return float(str(kind(value))) if isinstance(value, float) else value


def spooled(tables: Iterable[pyarrow.Table]) -> pyarrow.Table:
    """Copy tables of one schema, of which one at a time is in memory, to an unnamed file in the folder of temporary
    files (TMPDIR), and map it: the kernel reads what is accessed, and may forget it.

    The file's space is free again once nothing refers to the result. ``tables``: at least one.
    """
    import pyarrow as arrow

    with tempfile.NamedTemporaryFile(prefix="miles-async-rows-") as file:
        writer = None
        for table in tables:
            writer = writer or arrow.ipc.new_stream(file, table.schema)
            writer.write_table(table)
        assert writer is not None, "a table has at least one part"
        writer.close()
        file.flush()
        with arrow.memory_map(file.name) as mapped:
            return arrow.ipc.open_stream(mapped).read_all()
