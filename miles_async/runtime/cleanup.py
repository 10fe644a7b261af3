"""Cleaning up without hiding what went wrong before: the first error is the one that surfaces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

log = structlog.get_logger(__name__)


async def quietly(cleanup: Awaitable[object]) -> None:
    """Await ``cleanup`` while another error is on its way: an error of its own is only logged."""
    try:
        await cleanup
    except Exception as error:  # supervision point: the error before it must surface
        log.warning("cleaning up after an error failed, too", error=repr(error))


@asynccontextmanager
async def afterwards(cleanup: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Await ``cleanup()`` at the end, whatever the end is. Raises its error only if there was none before it."""
    try:
        yield
    except BaseException:
        await quietly(cleanup())
        raise
    await cleanup()
