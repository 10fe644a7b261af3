"""Open a file of ``--prompt-data``, of whatever kind."""

from __future__ import annotations

import os
from pathlib import Path

from miles_async.arguments.data import DataArguments
from miles_async.arguments.prompt_files import EXPECTED, HUB, hub_name, split_slice
from miles_async.errors import DataError
from miles_async.prompts.data_sets import hub_rows, saved_rows
from miles_async.prompts.files import JsonlFile, RowFile, RowSlice
from miles_async.prompts.layouts import recognize
from miles_async.prompts.tables import parquet_rows


def open_row_file(place: str, arguments: DataArguments, name: str | None = None) -> RowFile:
    """Open ``place``; ``name``: the beginning of its prompts' ids. Raises DataError when it is unreadable, empty or of
    another kind, ConfigurationError for a place that cannot be one.
    """
    file, chosen = split_slice(place)
    try:
        rows = _open(file, arguments)
    except OSError as error:
        raise DataError(f"{place}: cannot read prompt data: {error.strerror or error}") from None
    rows.label = name or rows.label
    if not len(rows):
        raise DataError(f"{place}: holds no prompts")
    if chosen is None:
        return rows
    part = RowSlice(rows, chosen)
    if not len(part):
        raise DataError(f"{place}: holds no prompts, the file has {len(rows)} rows")
    return part


def _open(file: str, arguments: DataArguments) -> RowFile:
    if file.startswith(HUB):
        return hub_rows(hub_name(file), file, arguments)
    path = Path(file)
    if file.endswith(".parquet"):
        return parquet_rows(path, arguments)
    if file.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        rows = JsonlFile(path)
        rows.use(recognize(rows.raw(0), arguments) if len(rows) else None, arguments)
        return rows
    if os.path.isdir(path):
        return saved_rows(path, arguments)
    raise DataError(f"{file}: prompt data must be {EXPECTED}; found {path.suffix or 'no suffix'!r}")
