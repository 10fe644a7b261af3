"""The line of a user's own code in which an error was raised."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_NOT_OWN = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}{os.sep}",  # this project's code
)


def own_place(error: BaseException) -> str:
    """`` at FILE:LINE``: the innermost line of the user's own code; empty if the error passed none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_OWN)]
    return "".join(f" at {frame.filename}:{frame.lineno}" for frame in own[-1:])
