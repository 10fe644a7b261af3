"""Output of a process that Ray started, in a file of the run."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def redirect_output(path: Path) -> None:
    """Redirect stdout and stderr of this process, including C++, to a file in the run directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
