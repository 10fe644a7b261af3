"""The heartbeat: a minute without a step prints one line that says what the run is doing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from miles_async.observability.progress import Progress
from miles_async.observability.standing import read_balance, standing_line

log = structlog.get_logger(__name__)

QUIET_SECONDS = 60.0  # without a step, a phase or a heartbeat


@asynccontextmanager
async def heartbeat(progress: Progress, ledger: Path, seconds: float = QUIET_SECONDS) -> AsyncIterator[None]:
    """Print heartbeats while the body runs. ``ledger``: of this run, as its rollout side writes it."""
    task = asyncio.create_task(_beat(progress, ledger, seconds), name="heartbeat")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _beat(progress: Progress, ledger: Path, seconds: float) -> None:
    while True:
        await asyncio.sleep(max(seconds - progress.quiet_seconds, 0.01))
        if progress.quiet_seconds < seconds:
            continue
        try:
            balance = await asyncio.to_thread(read_balance, ledger)
            progress.heartbeat("" if balance is None else standing_line(balance))
        except Exception as error:  # supervision point: a display never ends training
            log.warning("the heartbeat ends; the run goes on", error=repr(error))
            return
