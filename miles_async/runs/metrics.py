"""Metrics of a run, as it writes them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles_async.observability.metrics_file import FILE_NAME, read_metrics
from miles_async.runs.records import data_frame
from miles_async.types import JsonObject

POLL_SECONDS = 0.2


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
        lines = _Lines(self._path)
        over = False
        while not over:
            over = not self._follow or self._is_over()  # asked first: its last lines are read after its end
            yield from lines.new()
            if not over:
                time.sleep(POLL_SECONDS)

    async def __aiter__(self) -> AsyncIterator[JsonObject]:
        """As :meth:`__iter__`, while the event loop does other work."""
        lines = _Lines(self._path)
        over = False
        while not over:
            over = not self._follow or self._is_over()
            for line in lines.new():
                yield line
            if not over:
                await asyncio.sleep(POLL_SECONDS)

    def to_pandas(self) -> Any:
        """What is there now as a ``pandas.DataFrame``, one row per step with its evaluation and checkpoint."""
        rows = read_metrics(self._path) if self._path.is_file() else []
        return data_frame(rows).set_index("step") if rows else data_frame([])


class _Lines:
    """Reads the lines that were added since the last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._file: tuple[int, int] | None = None  # device and inode: a restarted run begins another one

    def new(self) -> Iterator[JsonObject]:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if self._file != (found.st_dev, found.st_ino):
                    self._file, self._offset = (found.st_dev, found.st_ino), 0
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:  # nothing yet
            return
        self._offset += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            with suppress(json.JSONDecodeError):  # torn by the end of a process
                yield json.loads(line)
