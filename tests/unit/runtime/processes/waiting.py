"""Waits of tests that start processes."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

from miles_async.runtime.processes.child_process import ChildProcess
from tests.waiting import until


async def number_in(child: ChildProcess) -> int:
    """Wait for a number in the last line of the child's output, and return it."""
    await until(lambda: child.tail(1).isdigit())
    return int(child.tail(1))


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Its environment, which is empty for a moment while the kernel replaces its program."""
    while not (environment := process.environ()):
        time.sleep(0.01)
    return environment


def children_with(word: str, parent: int | None = None) -> list[psutil.Process]:
    """Children that have this word in their command, which is empty while the kernel replaces their program. One that
    ends meanwhile is none of them.
    """
    found = []
    for child in psutil.Process(parent).children():
        with suppress(psutil.NoSuchProcess):  # or a zombie
            while not (command := child.cmdline()):
                time.sleep(0.01)
            found += [child] if word in command else []
    return found


async def until_gone(pid: int) -> None:
    """Wait for the end of a process, which need not have been reaped."""
    with suppress(psutil.NoSuchProcess):
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
