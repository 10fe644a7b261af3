"""Memory of this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Free memory in bytes, of this machine or of the container that this process is in."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        limit = int((_CGROUP / "memory.max").read_text())
        free = min(free, limit - int((_CGROUP / "memory.current").read_text()))
    return max(free, 0)
