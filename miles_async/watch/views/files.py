"""Files of a run to keep and to open in other programs: its timeline, made when it is asked for, and profiles."""

from __future__ import annotations

from pathlib import Path

from miles_async.runtime.files.run_directory import PROFILES
from miles_async.types import JsonObject
from miles_async.watch.run import Run
from miles_async.watch.timeline.build import FILE_NAME


def files(run: Run) -> list[JsonObject]:
    """The timeline, then profiles by name: [{"name", "bytes", "changed"}]. The timeline's size is not known before."""
    found: list[JsonObject] = [{"name": FILE_NAME, "bytes": None, "changed": None}]
    try:
        names = sorted(path.name for path in (run.directory / PROFILES).iterdir())
    except OSError:
        return found
    for name in names:
        if (path := profile(run, name)) is not None:
            status = path.stat()
            found.append({"name": name, "bytes": status.st_size, "changed": status.st_mtime})
    return found


def profile(run: Run, name: str) -> Path | None:
    """A file of the profiles; None if there is no such file."""
    return run.file(PROFILES, name) if Path(name).name == name else None
