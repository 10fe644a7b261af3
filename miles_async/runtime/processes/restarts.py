"""Restarts: a budget per time window, and the records of a run's restarts (``--max-run-restarts``).

The supervising process hands the records to each restarted run in its environment; ``restarts.json`` in the run
directory has them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from miles_async.runtime.clock import now

RESTARTS_FILE = "restarts.json"
RESTARTS_VARIABLE = "MILES_ASYNC_RESTARTS"
MOST_RESTARTS = 50  # that are recorded
LONGEST_REASON = 500  # characters of each


class RestartBudget:
    """At most ``count`` restarts in any ``window`` seconds: a long run outlives any fixed number of failures."""

    def __init__(self, count: int, window: float) -> None:
        self.count = count
        self.window = window
        self._times: deque[float] = deque()

    def take(self) -> bool:
        """Count a restart now and return True; return False, counting nothing, if the budget is used up."""
        while self._times and self._times[0] <= now() - self.window:
            self._times.popleft()
        if len(self._times) >= self.count:
            return False
        self._times.append(now())
        return True

    def __str__(self) -> str:
        return f"{self.count} times in {self.window:g} s"


class RunRestart(msgspec.Struct, frozen=True, kw_only=True):
    """A start of a run that ended early, and where the next one continued."""

    at: float  # seconds since 1970
    reason: str  # why it ended
    run_dir: str  # its files
    checkpoint: str | None  # where the next one continued; None: where the run had begun

    def __str__(self) -> str:
        place = self.checkpoint or "where it had begun"
        return f"restarted from {place} after: {self.reason} (its files: {self.run_dir})"


def restarts_variable(restarts: Sequence[RunRestart]) -> dict[str, str]:
    """Environment for the next start of a run: the last restarts, since Linux allows 128 KiB for a variable."""
    return {RESTARTS_VARIABLE: msgspec.json.encode(restarts[-MOST_RESTARTS:]).decode()}


def own_restarts() -> list[RunRestart]:
    """Restarts of this process's run so far."""
    return msgspec.json.decode(os.environ.get(RESTARTS_VARIABLE, "[]"), type=list[RunRestart])


def write_restarts(run_dir: Path, restarts: Sequence[RunRestart]) -> None:
    """Write them to a run directory, if there are any. Raises OSError."""
    if restarts:
        (run_dir / RESTARTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(restarts)) + b"\n")


def read_restarts(run_dir: Path) -> list[RunRestart]:
    """Read the records in a run directory; empty for a run that was never restarted."""
    try:
        return msgspec.json.decode((run_dir / RESTARTS_FILE).read_bytes(), type=list[RunRestart])
    except FileNotFoundError:
        return []
