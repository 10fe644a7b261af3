"""Metrics of a run as it writes them, and results as plain records; both as a table of pandas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from miles_async.errors import ConfigurationError
from miles_async.observability.metrics_file import FILE_NAME, AddedLinesReader, read_metrics, row_of
from miles_async.types import JsonObject

POLL_SECONDS = 0.2


class Records(list[JsonObject]):
    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row per record."""
        return data_frame(self)


def data_frame(rows: Sequence[JsonObject]) -> Any:
    """A ``pandas.DataFrame`` of ``rows``. Raises ConfigurationError if pandas is not installed."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ConfigurationError("to_pandas() needs pandas: pip install pandas") from error
    return pandas.DataFrame(list(rows))


class Metrics:
    """Lines of metrics.jsonl from the first on: an iterator, also an asynchronous one, that ends with the run.

    A line is a dictionary with ``kind`` (step, evaluation or checkpoint), ``step``, ``time`` and the metrics. Each
    loop over it begins at the first line.
    """

    def __init__(self, run_dir: Path, is_over: Callable[[], bool], *, follow: bool) -> None:
        """``follow``: wait for the lines that are to come."""
        self._path = run_dir / FILE_NAME
        self._is_over = is_over
        self._follow = follow

    def __iter__(self) -> Iterator[JsonObject]:
        """Yield the lines, waiting for new ones."""
        reader = AddedLinesReader(self._path)
        over = False
        while not over:
            over, rows = self._read(reader)
            yield from rows
            if not over:
                time.sleep(POLL_SECONDS)

    async def __aiter__(self) -> AsyncIterator[JsonObject]:
        """As :meth:`__iter__`, while the event loop does other work."""
        reader = AddedLinesReader(self._path)
        over = False
        while not over:
            over, rows = await asyncio.to_thread(self._read, reader)
            for row in rows:
                yield row
            if not over:
                await asyncio.sleep(POLL_SECONDS)

    def _read(self, reader: AddedLinesReader) -> tuple[bool, list[JsonObject]]:
        """(whether no line will follow, new lines)"""
        over = not self._follow or self._is_over()  # asked first: the last lines are read after the run's end
        return over, [row for line in reader.read().lines if (row := row_of(line)) is not None]

    def to_pandas(self) -> Any:
        """Return the metrics so far as a ``pandas.DataFrame``: one row per step, with its evaluation and checkpoint."""
        rows = read_metrics(self._path) if self._path.is_file() else []
        return data_frame(rows).set_index("step") if rows else data_frame([])
