"""Functions that tests of the worker pool run in workers. Imports nothing that takes time."""

from __future__ import annotations

import mmap
import os
import signal
import time


def double(number: int) -> int:
    return 2 * number


def pid() -> int:
    return os.getpid()


def hang() -> None:
    while True:
        pass


def hang_in_c() -> int:
    return len(str(10 ** (10**9)))  # no signal handler gets a turn


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_at_length() -> None:
    raise ValueError("x" * 1_000_000)


def shout() -> str:
    print("x" * 100_000, flush=True)
    os.write(1, b"y")
    return "done"


def explode() -> int:
    return len(mmap.mmap(-1, 6 << 30))  # address space only


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def fail() -> None:
    raise ZeroDivisionError("by nothing")
