"""Memory of this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Free memory in bytes, of this machine or of the container that this process is in. What files' pages take is
    free: the kernel gives it back when it is needed.
    """
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError, KeyError):  # no container, or one without a limit ("max")
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        parts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(parts["active_file"]) + int(parts["inactive_file"]))
    return max(free, 0)
