"""Waiting for what tells nobody when it happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from miles_async.simulation.virtual_time import run_in_virtual_time


async def until(condition: Callable[[], object], seconds: float = 50.0) -> None:
    """Return once the condition is true. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def in_virtual_time(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The coroutine function as a test that runs in virtual time."""
    return lambda: run_in_virtual_time(work(), limit_seconds=100_000)
