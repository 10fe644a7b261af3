"""Directories that belong to this user alone."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def make_private(path: Path) -> None:
    """Make a directory of mode 0700 whose name others can guess. Raises OSError, also if another user has made it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "expected a directory of this user, found another's", str(path))
    path.chmod(0o700)
