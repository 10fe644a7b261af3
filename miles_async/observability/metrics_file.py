"""``metrics.jsonl``: every metric of every step in the run directory, always, with or without other trackers.

One JSON object per line: ``{"kind": "step", "step": 3, "time": 1766000000.0, "reward/mean": 0.5, ...}``. A step may
have a line of each kind (its evaluation and checkpoint come later), and a resumed run repeats the steps after its
checkpoint, so :func:`read_metrics` merges by step and the last line wins.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from miles_async.runtime.json_texts import decoded_object
from miles_async.types import JsonObject

log = structlog.get_logger(__name__)

FILE_NAME = "metrics.jsonl"
AGE_COUNT = "age/count/"

Kind = Literal["step", "evaluation", "checkpoint"]
"""Kind of a line."""

_KINDS: Mapping[str, Kind] = {"eval": "evaluation", "checkpoint": "checkpoint"}  # by how their metrics begin


class MetricsFile:
    """The Tracker that appends to a file. About 50 µs per step, so it needs no separate thread."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open for appending. Raises OSError, which means that the run directory cannot be used."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._clock = clock
        self._failed = False

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one line and flush it, so that a killed run keeps its metrics."""
        numbers = {name: _json_number(value) for name, value in metrics.items()}
        row = {"kind": kind_of(metrics), "step": step, "time": self._clock(), **numbers}
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:  # disk full, or closed: no reason to stop
            if not self._failed:
                log.warning("metrics file cannot be written; later failures are silent", error=str(error))
            self._failed = True

    def finish(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


def kind_of(metrics: Mapping[str, object]) -> Kind:
    """Return the kind of these metrics.

    >>> kind_of({"eval/reward": 0.5})
    'evaluation'
    """
    return next((kind for name in metrics if (kind := _KINDS.get(name.split("/")[0]))), "step")


def age_metrics(ages: Mapping[int, int]) -> dict[str, float]:
    """A step's histogram as flat metrics: ``{0: 96, 1: 32}`` → ``{"age/count/0": 96, "age/count/1": 32}``."""
    return {f"{AGE_COUNT}{age}": float(count) for age, count in sorted(ages.items())}


def _json_number(value: float) -> float | int | None:
    """Replace NaN and infinity, which JSON lacks, by null: "not measured"."""
    number = value if isinstance(value, int) and not isinstance(value, bool) else float(value)
    return number if math.isfinite(number) else None


def read_metrics(path: Path) -> list[JsonObject]:
    """Read the metrics of each step, in order, with lines of one step merged and without ``kind``.

    A torn last line is skipped.
    """
    steps: dict[int, dict[str, object]] = {}
    for line in path.read_bytes().split(b"\n"):
        if (row := row_of(line)) is None:  # a run that was killed while it wrote
            continue
        row.pop("kind", None)
        steps.setdefault(row["step"], {}).update(row)
    return [steps[step] for step in sorted(steps)]


def row_of(line: bytes | str) -> dict[str, Any] | None:
    """The JSON object of a line; None if the line is torn, not UTF-8, or has no step.

    >>> row_of(b'{"kind": "step", "st') is None
    True
    """
    row = decoded_object(line)
    return row if isinstance(row.get("step"), int) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedLines:
    lines: Sequence[bytes]
    restarted: bool  # the file was replaced, cut or removed: earlier lines are void
    torn: bool  # half a line follows


class AddedLinesReader:
    """Reads what was added to a growing file since the last reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None  # device and inode: a restarted run begins another file
        self._offset = 0

    def read(self) -> AddedLines:
        """Read the complete lines that were added since the last call."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                identity = found.st_dev, found.st_ino
                restarted = identity != self._file or found.st_size < self._offset
                if restarted:
                    self._file, self._offset = identity, 0
                file.seek(self._offset)
                whole, newline, rest = file.read().rpartition(b"\n")
        except FileNotFoundError:
            self._file, self._offset = None, 0
            return AddedLines(lines=(), restarted=True, torn=False)
        self._offset += len(whole) + len(newline)
        lines = [line for line in whole.split(b"\n") if line]
        return AddedLines(lines=lines, restarted=restarted, torn=bool(rest))
