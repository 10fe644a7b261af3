"""A directory for large temporary files that is gone when its owner is: at its end, or, if it was killed, when the
next one is made in the same place.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "miles-async-"
_LOCK = ".owner"  # locked as long as the owner lives, whatever way it ends


class OwnedDirectory:
    """An empty directory of its own in ``parent``."""

    def __init__(self, parent: Path) -> None:
        """Makes ``parent`` too, and removes from it what dead owners left. Raises OSError."""
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
        self._lock = os.open(making / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        with suppress(OSError):  # a file system without locks: then nobody can sweep either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under its name only when it is locked: a sweep in between would take it for a dead owner's.
        self.path = making.rename(parent / making.name.replace(".making-", _PREFIX))
        self.path.chmod(0o755)  # mkdtemp lets nobody else in, and engines may run under another user

    def remove(self) -> None:
        """With everything in it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def sweep(parent: Path) -> None:
    """Remove the directories in ``parent`` whose owners are dead."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, or gone meanwhile
            lock = os.open(directory / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
