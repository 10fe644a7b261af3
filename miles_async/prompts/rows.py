"""All rows of ``--prompt-data``, one file after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from miles_async.arguments.data import DataArguments
from miles_async.arguments.prompt_files import EXPECTED, HUB, hub_name, split_slice
from miles_async.errors import ConfigurationError, DataError
from miles_async.prompts.data_sets import hub_rows, saved_rows
from miles_async.prompts.files import JsonlFile, RowFile, RowSlice
from miles_async.prompts.layouts import recognize
from miles_async.prompts.row import PromptRow, read_row
from miles_async.prompts.tables import parquet_rows
from miles_async.types import JsonObject

CheckRow = Callable[[PromptRow, str], None]
"""Check of a row at a location; raises DataError that begins with the location."""


class PromptRows:
    """Rows by index in [0, len), checked when they are read."""

    def __init__(self, arguments: DataArguments) -> None:
        """Open all files. Raises ConfigurationError, DataError."""
        self._arguments = arguments
        self._ids: dict[str, int] | None = None
        if not arguments.places:
            raise ConfigurationError(f"--prompt-data is required, the prompts: {EXPECTED}")
        self.files = tuple(open_row_file(place, arguments, name) for name, place in arguments.places)
        ends = list(accumulate(len(file) for file in self.files))
        self.ranges = tuple(range(end - len(file), end) for file, end in zip(self.files, ends, strict=True))
        self._ends = np.asarray(ends)
        labels = [file.label for file in self.files]
        for index, label in enumerate(labels):
            if label in labels[:index]:
                earlier, later = self.files[labels.index(label)], self.files[index]
                raise ConfigurationError(
                    f"--prompt-data: {earlier.place} and {later.place} are both called {label}, and ids of prompts "
                    "begin with that: give one a name before it"
                )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[JsonObject]:
        """Rows as they are in the files, with the columns of their layouts."""
        for file in self.files:
            yield from file

    @property
    def name(self) -> str:
        """The files, for messages."""
        return ", ".join(file.place for file in self.files)

    def read(self, index: int) -> PromptRow:
        """Raises DataError."""
        file, inside = self.place(index)
        return read_row(file.read(inside), file.keys, file.location(inside), is_json=file.is_json)

    def location(self, index: int) -> str:
        """The beginning of every message about this row."""
        file, inside = self.place(index)
        return file.location(inside)

    def prompt_id(self, row: PromptRow, index: int) -> str:
        """The id of the prompt in this row."""
        file, inside = self.place(index)
        return row.row_id if row.row_id is not None else f"{file.label}:{file.number(inside)}"

    @property
    def has_ids(self) -> bool:
        """Whether a column has the prompts' ids, for :meth:`index`."""
        return self._ids is not None

    def index(self, prompt_id: str) -> int | None:
        """The row of a prompt; None if no row has this id."""
        if self._ids is not None:
            return self._ids.get(prompt_id)
        label, _, number = prompt_id.rpartition(":")
        for file, rows in zip(self.files, self.ranges, strict=True):
            if file.label == label and number.isdecimal():
                inside = file.index(int(number))
                return None if inside is None else rows.start + inside
        return None

    def place(self, index: int) -> tuple[RowFile, int]:
        """The file of a row, and its index there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.files[number], index - self.ranges[number].start

    def check(self, check: CheckRow | None = None) -> None:
        """Check every row. Raises DataError naming file and line: bad JSON, missing key, wrong type, duplicate id,
        an image with a broken header.
        """
        first_with: dict[str, int] = {}
        for file, rows in zip(self.files, self.ranges, strict=True):
            for index, row in enumerate(file):
                location = file.location(index)
                checked = read_row(row, file.keys, location, is_json=file.is_json)
                if check is not None:
                    check(checked, location)
                for image in checked.images:
                    image.size()
                if checked.row_id is None:
                    continue
                first = first_with.setdefault(checked.row_id, rows.start + index)
                if first != rows.start + index:
                    earlier = self.location(first)
                    where = f"line {earlier.rpartition(':')[2]}" if earlier.startswith(f"{file.place}:") else earlier
                    raise DataError(
                        f"{location}: duplicate id {checked.row_id!r} in {file.keys.prompt_id_key!r} "
                        f"(--prompt-id-key): {where} has it too"
                    )
        if first_with and self._arguments.prompt_sampler != "uniform":  # which asks for rows by id
            self._ids = first_with


def open_prompts(arguments: DataArguments, check: CheckRow | None = None) -> PromptRows:
    """Open ``--prompt-data`` and check every row: 20,000 rows take well under a second.

    ``check``: a further check of each row, such as that it can be rewarded. Raises ConfigurationError, and DataError
    naming file and line.
    """
    rows = PromptRows(arguments)
    rows.check(check)
    return rows


def open_row_file(place: str, arguments: DataArguments, name: str | None) -> RowFile:
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
