"""Write a samples file in parts, atomically."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from miles_async.samples.columns import METADATA_KEY, FileNote, SampleRow, arrow_schema
from miles_async.samples.files import PARTIAL

_REPEATED = ("token_texts.list.element",)
"""Columns whose values repeat, by their paths in Parquet."""


class FileWriter:
    """One file. It has its name after :meth:`close`; :meth:`discard` removes the unfinished file."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        from pyarrow import parquet

        self._path = path
        self._partial = path.with_name(path.name + PARTIAL)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._schema = arrow_schema()
        self._writer = parquet.ParquetWriter(
            self._partial,
            self._schema,
            compression="zstd",
            use_dictionary=list(_REPEATED),  # elsewhere it costs time and bytes: log-probs don't repeat
            write_statistics=False,  # no reader skips row groups by them
        )

    def add(self, rows: Sequence[SampleRow]) -> None:
        """Write rows as one row group. Raises OSError."""
        import pyarrow as arrow

        columns = {name: [getattr(row, name) for row in rows] for name in SampleRow.__struct_fields__}
        columns["turns"] = msgspec.to_builtins(columns["turns"])  # Arrow knows no structs of msgspec
        self._writer.write_table(arrow.table(columns, schema=self._schema))

    def size(self) -> int:
        """Bytes written so far."""
        return self._partial.stat().st_size

    def close(self, note: FileNote) -> int:
        """Complete the file, with its note, and return its bytes. Raises OSError."""
        self._writer.add_key_value_metadata({METADATA_KEY: msgspec.json.encode(note)})
        self._writer.close()
        size = self._partial.stat().st_size
        self._partial.replace(self._path)
        return size

    def discard(self) -> None:
        """Remove the unfinished file; raises nothing."""
        with suppress(OSError):
            self._writer.close()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)
