"""Tables that are larger than memory should be: on disk, mapped into memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow


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
