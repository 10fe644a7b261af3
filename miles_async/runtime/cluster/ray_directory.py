"""A directory for Ray's files that other users of the machine cannot enter.

Ray makes its session directories, with the sockets of its object store in them, writable for everybody, and its token
readable for everybody.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from miles_async.errors import ConfigurationError

_VARIABLE = "RAY_TMPDIR"  # where Ray keeps its files


def ray_directory() -> Path:
    """Make a place for Ray's sessions: ``ray-UID/r`` in $RAY_TMPDIR or /tmp, where ``ray-UID`` has mode 0700.

    Ray opens the place itself to everybody, so the directory above it is the closed one. The path is short, since those
    of sockets below it may have 107 characters. Raises ConfigurationError if somebody else has made ``ray-UID``.
    """
    path = Path(os.environ.get(_VARIABLE) or "/tmp") / f"ray-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigurationError(
                f"{path}: expected a directory of this user for Ray's files, found another's: remove it, or name "
                f"another place by {_VARIABLE}"
            )
        path.chmod(0o700)
    except OSError as error:
        raise ConfigurationError(
            f"{path}: cannot hold Ray's files ({error.strerror}): name another place by {_VARIABLE}"
        ) from error
    return path / "r"


def protect_token() -> None:
    """Make the token that Ray has written to ~/.ray readable for this user alone."""
    with suppress(OSError, RuntimeError):  # there is none, or it is managed by others
        token = Path.home() / ".ray" / "auth_token"
        if token.stat().st_mode & 0o077:
            token.chmod(0o600)
