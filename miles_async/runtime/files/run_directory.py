"""The run directory: owned by one run at a time. An earlier run's is moved aside, anything else is left alone.

``run.json`` marks the directory as a run's, says which process drives it, and is locked until that process ends.
"""

from __future__ import annotations

import asyncio
import difflib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from miles_async.errors import ConfigurationError, RunDirectoryError
from miles_async.runtime.processes.run_process import (
    RUN_FILE,
    RunProcess,
    describe_driver,
    find_driver,
    find_keeper,
    note_run_process,
    read_run_process,
)

CONFIG_FILE = "config.toml"  # every flag in force
LEDGER_FILE = "ledger.sqlite"
SCHEDULE_FILE = "schedule.msgpack"  # --record
PROFILES = "profiles"  # directory: --profile-step
ENGINES_FILE = "engines.json"  # an EnginesReport
RANKS_FILE = "ranks.json"  # a RanksReport
CODE_DIRECTORY = "carried"  # functions and classes given to miles_async.start
CONSOLE_FILE = "console.log"  # what a run prints that miles_async.start has started

_FROM_START = {CODE_DIRECTORY, CONSOLE_FILE}  # which may be there before the run
_WATCH_SECONDS = 1.0
_TIME = re.compile(r"\d{8}-\d{6}(-\d+)?")  # after the name of a directory that was moved aside


class Claim:
    """A run directory that belongs to this process's run."""

    def __init__(self, directory: Path, lock: int) -> None:
        self._directory = directory
        self._lock = lock

    async def until_lost(self) -> NoReturn:
        """Wait until the directory or its contents are removed, replaced or moved; raise RunDirectoryError then.

        Open files would hide that: writes to them still work, and are lost when the process ends.
        """
        while await asyncio.to_thread(_is_same_file, self._lock, self._directory / RUN_FILE):  # noqa: ASYNC110
            await asyncio.sleep(_WATCH_SECONDS)
        raise RunDirectoryError(
            f"--run-dir {self._directory} was removed, moved or replaced during the run: its ledger, metrics and logs "
            "cannot be written there any more, so the run ends. Resume from its last checkpoint with --load"
        )


@contextmanager
def claimed(directory: Path, control: Path) -> Iterator[Claim]:
    """Claim ``directory`` for this process's run: empty but for ``run.json``, a ``logs`` folder, and carried code and
    output of :func:`miles_async.start`.

    An earlier run's directory is renamed to ``<name>.<time>``. ``control``: the socket of this run (control.py).
    Raises ConfigurationError where :func:`check_run_directory` does, and if the directory cannot be made.
    """
    check_run_directory(directory)
    try:
        lock = _locked_and_empty(directory)
    except OSError as error:
        raise ConfigurationError(f"--run-dir {directory}: {error}") from error
    try:
        note_run_process(directory, control)
        (directory / "logs").mkdir()
        yield Claim(directory, lock)
    finally:
        os.close(lock)


def move_aside(directory: Path) -> Path:
    """Rename the directory of a run that is over, as the next run would. Returns where it is then.

    Raises ConfigurationError if the run is under way.
    """
    lock = _locked(directory)
    try:
        return _rename_by_time(directory)
    finally:
        os.close(lock)


def find_run(directory: Path) -> tuple[Path, RunProcess]:
    """Where the files of the run in ``directory`` are, and its processes.

    Between two lives of a run with ``--max-run-restarts`` the files may have been moved aside.
    Raises ConfigurationError: there is no such directory, or it has no run.
    """
    try:
        return directory, read_run_process(directory)
    except ConfigurationError:
        for aside in _moved_aside(directory):
            with suppress(ConfigurationError):
                run = read_run_process(aside)
                if find_keeper(run) is not None:
                    return aside, run
        check_directory(directory)
        raise


def carry_over(earlier: Path, directory: Path) -> None:
    """Copy the carried code of an earlier start of the run to the one that will start in ``directory``, and move the
    file to which both print.
    """
    if (earlier / CODE_DIRECTORY).is_dir():
        shutil.copytree(earlier / CODE_DIRECTORY, directory / CODE_DIRECTORY)
    if (earlier / CONSOLE_FILE).is_file():
        directory.mkdir(exist_ok=True)
        (earlier / CONSOLE_FILE).rename(directory / CONSOLE_FILE)


def owner_of(directory: Path) -> tuple[int, int] | None:
    """Identify the run that owns a directory: device and inode of ``run.json``; None if none does."""
    try:
        found = (directory / RUN_FILE).stat()
    except FileNotFoundError:
        return None
    return (found.st_dev, found.st_ino) if found.st_size else None


def check_run_directory(directory: Path) -> None:
    """Raise ConfigurationError unless a run could claim ``directory`` now. Changes nothing."""
    place = directory.resolve()
    for name, path in {"working": Path.cwd(), "home": Path(os.path.expanduser("~")).resolve()}.items():
        if path.is_relative_to(place):
            raise ConfigurationError(
                f"--run-dir {directory}: the {name} directory {path} is there or below, and a run directory is moved "
                "aside by the next run: choose a separate one, such as runs/latest"
            )
    try:
        if not directory.is_dir() or all(path.name in _FROM_START for path in directory.iterdir()):
            return
        if not (directory / RUN_FILE).is_file():
            raise ConfigurationError(
                f"--run-dir {directory}: expected no such directory, an empty one or that of an earlier run (which is "
                f"moved aside), found files and no {RUN_FILE}: choose another --run-dir"
            )
        os.close(_locked(directory))
    except OSError as error:
        raise ConfigurationError(f"--run-dir {directory}: {error}") from error


def check_directory(directory: Path) -> None:
    """Check that the run directory exists. Raises ConfigurationError with the nearest name if not."""
    try:
        if directory.is_dir():
            return
        near = list(directory.parent.iterdir()) if directory.parent.is_dir() else []
        siblings = [path.name for path in near if path.is_dir()]
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be looked for: {error}") from error
    nearest = difflib.get_close_matches(directory.name, siblings, n=1)
    hint = f"; did you mean {directory.with_name(nearest[0])}?" if nearest else ""
    raise ConfigurationError(f"there is no directory {directory}{hint}")


def _locked_and_empty(directory: Path) -> int:
    """Lock a new ``run.json``, even if other runs replace the directory meanwhile."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        lock = _locked(directory)
        if not _is_same_file(lock, directory / RUN_FILE):  # another run moved it aside before it was locked
            os.close(lock)
        elif os.fstat(lock).st_size == 0:
            return lock
        else:  # no other run can move it while its lock is held
            _rename_by_time(directory)
            os.close(lock)


def _rename_by_time(directory: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(directory.stat().st_mtime))
    names = (f"{directory.name}.{stamp}", *(f"{directory.name}.{stamp}-{number}" for number in range(2, 1000)))
    return directory.rename(next(path for path in map(directory.with_name, names) if not path.exists()))


def _locked(directory: Path) -> int:
    """Lock ``run.json`` and return its descriptor. Raises ConfigurationError naming the process that has it."""
    lock = os.open(directory / RUN_FILE, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = False
    except BlockingIOError:
        taken = True
    except OSError:  # a file system without locks: the file's content decides
        taken = os.fstat(lock).st_size > 0 and find_driver(read_run_process(directory)) is not None
    if taken:
        os.close(lock)
        raise ConfigurationError(
            f"--run-dir {directory} belongs to a run that is under way: {describe_driver(directory)}. Choose another "
            f"--run-dir, or end that run with `miles-async stop {directory}`"
        )
    return lock


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError as error:  # others may pass, as of a network disk
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def _moved_aside(directory: Path) -> list[Path]:
    """Directories of earlier runs in ``directory``, newest first."""
    start = f"{directory.name}."
    with suppress(OSError):
        near = [path for path in directory.absolute().parent.iterdir() if path.name.startswith(start)]
        return sorted((path for path in near if _TIME.fullmatch(path.name.removeprefix(start))), reverse=True)
    return []
