"""Run commands in ``process_tree.py``, which leaves none of their processes behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from miles_async.rollout import process_tree

_END_SECONDS = 10.0  # more than the wrapper takes


def wrapped(command: Sequence[str]) -> tuple[str, ...]:
    """The command in its wrapper, which ends with this process. Start it with ``start_new_session``."""
    return (sys.executable, "-I", "-S", process_tree.__file__, str(os.getpid()), *command)


async def end(process: asyncio.subprocess.Process) -> None:
    """Make the wrapper end its command if it still runs; return once both have ended."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
    with suppress(ProcessLookupError):  # if the wrapper itself was killed
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
