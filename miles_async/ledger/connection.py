"""Connect to a ledger for reading, even in a read-only directory, such as a copy from a cluster."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_NO_SHARED_MEMORY = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
"""SQLite's errors where it cannot create the ``-shm`` file of a ledger in WAL mode."""


@contextmanager
def connected(path: Path) -> Iterator[sqlite3.Connection]:
    """Connect until the end of the block. Raises sqlite3.Error, and OSError for a log that cannot be copied."""
    with ExitStack() as stack:
        try:
            connection = _connect(path, "mode=ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _NO_SHARED_MEMORY:
                raise
            connection = _connect(*stack.enter_context(_in_read_only_directory(path)))
        stack.callback(connection.close)
        yield connection


def _connect(path: Path, how: str) -> sqlite3.Connection:
    """Connect and read once, since SQLite opens the file only then."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


@contextmanager
def _in_read_only_directory(path: Path) -> Iterator[tuple[Path, str]]:
    """How to open a ledger that no run on this machine can be writing."""
    log = path.with_name(f"{path.name}-wal")
    if not log.is_file() or log.stat().st_size == 0:
        yield path, "mode=ro&immutable=1"
        return
    with TemporaryDirectory() as directory:  # a killed run's last rows are in the log, which `immutable` leaves out
        for file in (path, log):
            shutil.copy(file, directory)
        yield Path(directory) / path.name, "mode=rw"
