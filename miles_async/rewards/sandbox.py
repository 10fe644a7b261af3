"""Code of a confined process: a program, or one of the two halves of tests that call its functions.

``program`` is the program itself: it reads its input and prints. For tests that are statements, ``serve`` executes the
program and answers calls of its functions, and ``judge`` executes the statements, in another process: expected
values never enter the program's, and the verdict is the judge's exit status (``remote_objects.py``).

The first LENGTH bytes of stdin are the source, the rest is a program's input. STATUS_END, closed before the source
runs, gets ``STARTED`` when the limits are in force, else the error.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Callable
from typing import Literal

from miles_async.rewards.confinement import confine, limit
from miles_async.rewards.remote_objects import fresh_main, judge, serve
from miles_async.runtime.processes.dies_with_parent import die_with

STARTED = b"+"
PASSED = 42  # exit status of a judge whose statements have all run through
Level = Literal["seccomp", "landlock", "off"]  # Landlock comes with seccomp


def program(source: str) -> None:
    """Become the program."""
    exec(compile(source, "<program>", "exec"), fresh_main())


def main() -> None:
    """Confine this process, then run the source from stdin."""
    role, level, libraries, *numbers = sys.argv[1:11]
    parent, cpu_seconds, memory_bytes, length, status_end, read_end, write_end = map(int, numbers)
    try:
        die_with(parent)
        source = b""
        while len(source) < length and (chunk := os.read(0, length - len(source))):
            source += chunk
        limit(cpu_seconds, memory_bytes)
        if level != "off":
            confine(readable=[libraries] if level == "landlock" else None)
    except (OSError, ValueError, KeyError) as error:
        os.write(status_end, repr(error).encode())
        os._exit(1)
    os.write(status_end, STARTED)
    os.close(status_end)
    sys.path.append(libraries)
    sys.argv[:] = ["program"]
    site.setquit()  # the builtin exit(), which starting without site leaves out
    run: dict[str, Callable[[str], None]] = {
        "program": program,
        "serve": lambda text: serve(text, (read_end, write_end)),
        "judge": lambda text: _judge(text, (read_end, write_end)),
    }
    run[role](source.decode())


def _judge(source: str, pipes: tuple[int, int]) -> None:
    try:
        judge(source, pipes)
    except BaseException:  # supervision point: no statement ends with the status of success, SystemExit included
        os._exit(1)
    os._exit(PASSED)
