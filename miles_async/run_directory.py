"""Where a run writes. An earlier run in the same place is moved aside, never overwritten."""

from __future__ import annotations

import time
from pathlib import Path

from miles_async.errors import ConfigurationError

LEDGER_FILE = "ledger.sqlite"


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


def _unused(path: Path) -> Path:
    candidates = (path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000)))
    return next(candidate for candidate in candidates if not candidate.exists())
