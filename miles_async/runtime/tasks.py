"""Structured concurrency with one rule: the first error is the one that surfaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

import structlog

from miles_async.errors import first_error

log = structlog.get_logger(__name__)


async def gathered[Result](*work: Coroutine[object, object, Result]) -> list[Result]:
    """Run coroutines concurrently; return results in order. The first error cancels the others and is raised."""
    if len(work) == 1:  # nothing to cancel; a scope costs 30 µs
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as scope:
            tasks = [scope.create_task(part) for part in work]
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    return [task.result() for task in tasks]


async def first_of[Result](*waits: Awaitable[Result]) -> Result:
    """Return the first result, having cancelled the other waits and waited for their end.

    Not a TaskGroup left by an exception: before Python 3.13 that swallows a cancellation from outside which
    arrives in the same moment, and its waiter would never end (python/cpython#116720).
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return done.pop().result()


async def quietly(cleanup: Awaitable[object]) -> None:
    """Await ``cleanup`` while another error propagates; an error of the cleanup is only logged."""
    try:
        await cleanup
    except Exception as error:  # supervision point: the error before it must surface
        log.warning("cleaning up after an error failed, too", error=repr(error))


@asynccontextmanager
async def afterwards(cleanup: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Await ``cleanup()`` on exit. Its error is raised only if the body raised none."""
    try:
        yield
    except BaseException:
        await quietly(cleanup())
        raise
    await cleanup()
