"""Several coroutines at once, as one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from miles_async.errors import first_error

Result = TypeVar("Result")


async def together(*work: Coroutine[Any, Any, Any]) -> None:
    """All of them, to the end of the last. The first error ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as scope:
            for part in work:
                scope.create_task(part)
    except BaseExceptionGroup as group:
        raise first_error(group) from None


async def gathered(*work: Coroutine[Any, Any, Result]) -> list[Result]:
    """Run coroutines concurrently and return their results in order; raise the first error."""
    try:
        async with asyncio.TaskGroup() as scope:
            tasks = [scope.create_task(part) for part in work]
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    return [task.result() for task in tasks]
