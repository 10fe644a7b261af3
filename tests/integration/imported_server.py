"""A fork server of a run (``fork_server.py``), forked itself from one that has imported its modules.

    python -m tests.integration.imported_server PATH ENVIRONMENT LATE MODULE...

PATH is that of its socket, ENVIRONMENT a JSON file with its environment, to which imports have added. LATE and MODULE
are as they are there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from miles_async.runtime.processes import run_process
from miles_async.runtime.processes.fork_server import serve
from miles_async.runtime.processes.forking import listen

MARK = "MILES_ASYNC_TEST_RUN"  # every process of a test's run inherits it, however it detaches
ROOM_FOR_MARKS = dict.fromkeys((run_process.MARK, MARK), "0" * 32)
"""Variables that the first process has to be started with, so that :func:`show_marks` finds room in its forks."""


def show_marks(environment: Mapping[str, str]) -> None:
    """Show the run's marks in /proc/PID/environ of this process and its children, by which they are found.

    The kernel shows the memory in which a program found its environment when it was executed, which a fork inherits.
    """
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        shown = memory.read(end - start)
        for name, room in ROOM_FOR_MARKS.items():
            assert len(environment[name]) == len(room), environment[name]
            memory.seek(start + shown.index(f"{name}={room}".encode()) + len(f"{name}="))
            memory.write(environment[name].encode())


def main() -> None:
    """Serve; returns in children of this server that have run."""
    path, environment, late, *modules = sys.argv[1:]
    show_marks(os.environ)
    serve(listen(Path(path)), late, modules, json.loads(Path(environment).read_text()))


if __name__ == "__main__":
    main()
