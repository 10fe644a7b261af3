"""metrics.jsonl as columns, read incrementally.

10,000 steps of 150 metrics are 12 MB here, and a poll parses only lines that were added since. Lines of one step are
merged, the last one wins, as in ``observability.metrics_file.read_metrics``.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from miles_async.observability.metrics_file import AddedLinesReader, row_of

_OWN = ("kind", "step", "time")


@dataclass(frozen=True, slots=True)
class Series:
    """A metric over the steps at which it was measured, in order of step."""

    steps: np.ndarray  # int64 [n]
    values: np.ndarray  # float64 [n], finite


class MetricsTable:
    """The columns of one file. Safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._reader = AddedLinesReader(path)
        self._clear()

    def _clear(self) -> None:
        self._skipped = 0
        self._torn = False
        self._last_time: float | None = None
        self._steps = array("q")  # of each row
        self._row_of: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {}

    def refresh(self) -> None:
        """Read new lines. A file that was replaced or cut is read again from its start."""
        with self._lock:
            added = self._reader.read()
            if added.restarted:
                self._clear()
            self._torn = added.torn
            for line in added.lines:
                if not self._take(line):
                    self._skipped += 1

    @property
    def notes(self) -> list[str]:
        """Sentences about lines that could not be read."""
        found = []
        if self._skipped:
            found.append(f"{self._path.name}: {self._skipped} unreadable lines were skipped")
        if self._torn:
            found.append(f"{self._path.name}: the last line is half-written and was skipped")
        return found

    @property
    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._columns)

    @property
    def last_time(self) -> float | None:
        """When the newest line was written, in seconds since 1970."""
        return self._last_time

    def series(self, name: str) -> Series:
        """A metric over the steps; empty if it was never measured."""
        with self._lock:
            column = np.array(self._columns.get(name, ()), dtype=np.float64)
            steps = np.array(self._steps[: len(column)], dtype=np.int64)
        known = np.isfinite(column)
        steps, column = steps[known], column[known]
        if len(steps) > 1 and (np.diff(steps) < 0).any():  # an evaluation of an earlier step, a resumed run
            order = np.argsort(steps, kind="stable")
            steps, column = steps[order], column[order]
        return Series(steps, column)

    def last(self, name: str) -> float | None:
        values = self.series(name).values
        return float(values[-1]) if len(values) else None

    def rows(self, names: Sequence[str]) -> dict[int, dict[str, float]]:
        """Step → the named metrics where they were measured, in order of step."""
        found: dict[int, dict[str, float]] = {}
        for name in names:
            series = self.series(name)
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                found.setdefault(step, {})[name] = value
        return dict(sorted(found.items()))

    def _take(self, line: bytes) -> bool:
        row = row_of(line)
        if row is None:
            return False
        step = row["step"]
        if isinstance(time := row.get("time"), int | float):
            self._last_time = max(float(time), self._last_time or 0.0)
        number = self._row_of.setdefault(step, len(self._steps))
        if number == len(self._steps):
            self._steps.append(step)
        self._put(number, row)
        return True

    def _put(self, number: int, row: Mapping[str, object]) -> None:
        columns = self._columns
        for name, value in row.items():
            column = columns.get(name)
            if column is not None and type(value) is float and len(column) == number:  # nearly all
                column.append(value)
            elif name not in _OWN and (value is None or isinstance(value, int | float)):
                column = columns.setdefault(name, array("d"))
                column.extend([math.nan] * (number + 1 - len(column)))
                column[number] = math.nan if value is None else float(value)


def within(series: Series, low: float, high: float) -> Series:
    """The part of a series from step ``low`` to ``high``."""
    inside = (series.steps >= low) & (series.steps <= high)
    return Series(series.steps[inside], series.values[inside])


def down_sampled(series: Series, points: int) -> Series:
    """At most ``points`` values: the smallest and largest of each stretch, so that no peak is lost.

    The first and the last value stay.
    """
    steps, values = series.steps, series.values
    if len(steps) <= points:
        return series
    bounds = np.linspace(1, len(steps) - 1, max(1, (points - 2) // 2) + 1).astype(int)
    chosen = {0, len(steps) - 1}
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if end > start:
            part = values[start:end]
            chosen |= {start + int(part.argmin()), start + int(part.argmax())}
    order = np.array(sorted(chosen))
    return Series(steps[order], values[order])


def stretch_means(series: Series, points: int) -> Series | None:
    """The mean of each of ``points // 2`` stretches, at their last steps, where :func:`down_sampled` has extremes; None
    where that has all values.
    """
    steps, values = series.steps, series.values
    if len(steps) <= points:
        return None
    bounds = np.linspace(0, len(steps), max(1, points // 2) + 1).astype(int)
    return Series(steps[bounds[1:] - 1], np.add.reduceat(values, bounds[:-1]) / np.diff(bounds))


def encoded_series(series: Series) -> dict[str, list[float]]:
    """For the page: steps and values as lists of equal length."""
    return {"steps": series.steps.tolist(), "values": series.values.tolist()}
