"""Temporary directories that are removed with their owner: when it ends, or, if it was killed, when the next one is
made in the same place or ``miles-async stop`` runs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PREFIX = "miles-async-"
_LOCK = ".owner"  # locked while the owner lives, however it ends
_ELSEWHERE = ".elsewhere"  # inode and path of files elsewhere that are removed with the directory
_MEMORY = Path("/dev/shm")
_LONGEST = 50  # characters of a parent: paths of sockets have at most 107


class OwnedDirectory:
    """A new, empty directory in ``parent``."""

    def __init__(self, parent: Path, *, mode: int = 0o755, name: str | None = None) -> None:
        """Makes ``parent`` too, and removes directories of dead owners from it. Raises OSError.

        ``mode``: by default all users may enter, since engines may run under another one. ``name``: of an owned
        directory of another node; None: a new one.
        """
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
        self._lock = os.open(making / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        with suppress(OSError):  # a file system without locks: then no sweep can either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under its name only when it is locked: a sweep in between would take it for a dead owner's.
        self.path = making.rename(parent / (name or making.name.replace(".making-", PREFIX)))
        self.path.chmod(mode)
        self._elsewhere: set[Path] = set()

    def owns(self, files: Iterable[Path]) -> None:
        """Remove these files with the directory. They may be gone by then, or others in their place."""
        for file in set(files) - self._elsewhere:
            with suppress(FileNotFoundError), (self.path / _ELSEWHERE).open("a") as elsewhere:
                elsewhere.write(f"{file.lstat().st_ino} {file}\n")
            self._elsewhere.add(file)

    def remove(self) -> None:
        """Remove the directory, its contents and the files it owns elsewhere; idempotent."""
        _remove(self.path)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def temporary_parent() -> Path:
    """Return the directory for small temporary files, sockets among them."""
    chosen = tempfile.gettempdir()
    return Path(chosen if len(chosen) <= _LONGEST else "/tmp")


def sweep(parent: Path) -> None:
    """Remove the directories in ``parent`` whose owners are dead, and what they own elsewhere."""
    for directory in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or gone meanwhile
            lock = os.open(directory / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(directory)
            finally:
                os.close(lock)


def sweep_temporary(named: Path | None = None) -> None:
    """:func:`sweep` wherever a run has temporary directories on this machine, and in ``named``."""
    for parent in (temporary_parent(), Path(tempfile.gettempdir()), _MEMORY, *([named] if named else [])):
        sweep(parent)


def _remove(directory: Path) -> None:
    with suppress(OSError):
        ours = directory.lstat().st_uid == os.getuid()  # in /tmp others could name our files in one of theirs
        for line in (directory / _ELSEWHERE).read_text().splitlines() if ours else ():
            inode, _, path = line.partition(" ")
            with suppress(OSError):
                if os.lstat(path).st_ino == int(inode):
                    os.unlink(path)
    shutil.rmtree(directory, ignore_errors=True)
