"""Where a run writes. An earlier run in the same place is moved aside, never overwritten."""

from __future__ import annotations

import difflib
import time
from pathlib import Path

from miles_async.errors import ConfigurationError

CONFIG_FILE = "config.toml"  # every flag in force
LEDGER_FILE = "ledger.sqlite"
STAGING_DIRECTORY = "weights"  # empty again at the end of a run
SCHEDULE_FILE = "schedule.msgpack"  # --record


def prepare_run_directory(directory: Path) -> Path:
    """Make ``directory`` empty, with a ``logs`` folder; an older run goes to ``<name>.<time>``."""
    try:
        if directory.is_dir() and any(directory.iterdir()):
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(directory.stat().st_mtime))
            directory.rename(_unused(directory.with_name(f"{directory.name}.{stamp}")))
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--run-dir {directory}: {error}") from error
    return directory


def check_directory(directory: Path) -> None:
    """Raises ConfigurationError with the nearest name if there is no such directory."""
    if directory.is_dir():
        return
    siblings = [path.name for path in directory.parent.iterdir() if path.is_dir()] if directory.parent.is_dir() else []
    nearest = difflib.get_close_matches(directory.name, siblings, n=1)
    hint = f"; did you mean {directory.with_name(nearest[0])}?" if nearest else ""
    raise ConfigurationError(f"there is no directory {directory}{hint}")


def _unused(path: Path) -> Path:
    candidates = (path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000)))
    return next(candidate for candidate in candidates if not candidate.exists())
