"""Run a command that dies with its parent: ``python dies_with_parent.py PARENT_PID command ...`` becomes the command.

A wrapper instead of ``preexec_fn``, because the parent is a many-threaded Ray worker, where running Python
between fork and exec may deadlock. The setting survives exec. Standard library only: it starts in
milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    die_with(parent)
    os.execvp(command[0], command)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies. Raises SystemExit if it is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above took effect
        raise SystemExit("parent process is gone")


if __name__ == "__main__":
    main(sys.argv[1:])
