"""Waits of tests that start processes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import psutil

from miles_async.runtime.processes.child_process import ChildProcess


async def number_in(child: ChildProcess) -> int:
    """Wait for a number in the last line of the child's output, and return it."""
    async with asyncio.timeout(20):
        while not child.tail(1).isdigit():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return int(child.tail(1))


async def until_gone(pid: int) -> None:
    """Wait for the end of a process, which need not have been reaped."""
    with suppress(psutil.NoSuchProcess):
        async with asyncio.timeout(50):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
