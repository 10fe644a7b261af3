"""Records of a run's earlier lives (``--max-run-restarts``): ``restarts.json`` in its run directory.

The supervising process hands the list to each life in its environment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

RESTARTS_FILE = "restarts.json"
RESTARTS_VARIABLE = "MILES_ASYNC_RESTARTS"


class RunRestart(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a run that ended before its time, and where the next one went on."""

    at: float  # seconds since 1970
    reason: str  # why it ended
    run_dir: str  # its files
    checkpoint: str | None  # from which the next one started; None: from where the run had begun

    def __str__(self) -> str:
        place = self.checkpoint or "where it had begun"
        return f"restarted from {place} after: {self.reason} (its files: {self.run_dir})"


def restarts_variable(restarts: Sequence[RunRestart]) -> dict[str, str]:
    """Environment for the next life of a run."""
    return {RESTARTS_VARIABLE: msgspec.json.encode(restarts).decode()}


def own_restarts() -> list[RunRestart]:
    """Restarts of this process's run so far."""
    return msgspec.json.decode(os.environ.get(RESTARTS_VARIABLE, "[]"), type=list[RunRestart])


def write_restarts(run_dir: Path, restarts: Sequence[RunRestart]) -> None:
    """Write them to a run directory, if there are any. Raises OSError."""
    if restarts:
        (run_dir / RESTARTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(restarts)) + b"\n")


def read_restarts(run_dir: Path) -> list[RunRestart]:
    """Read those of a run directory; empty for a run that was never restarted."""
    try:
        return msgspec.json.decode((run_dir / RESTARTS_FILE).read_bytes(), type=list[RunRestart])
    except FileNotFoundError:
        return []
