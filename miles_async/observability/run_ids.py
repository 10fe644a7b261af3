"""Ids that trackers gave a run, in its run directory: a run that is restarted continues what it had begun."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from miles_async.runtime.processes.restarts import own_restarts


def save_run_id(run_dir: Path, tracker: str, run_id: str) -> None:
    """Write the id to ``<tracker>_run_id``; a directory that cannot be written costs a later restart the id only."""
    with suppress(OSError):
        _file(run_dir, tracker).write_text(f"{run_id}\n")


def earlier_run_id(tracker: str) -> str | None:
    """The id that the newest of this run's earlier starts had (``--max-run-restarts``); None if none had one."""
    for restart in reversed(own_restarts()):
        with suppress(OSError):
            return _file(Path(restart.run_dir), tracker).read_text().strip() or None
    return None


def _file(run_dir: Path, tracker: str) -> Path:
    return run_dir / f"{tracker}_run_id"
