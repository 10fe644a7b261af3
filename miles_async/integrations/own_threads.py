"""Calls of blocking code that may never return, each in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T]) -> T:
    """Return what ``work`` returns, or raise what it raises.

    Not ``asyncio.to_thread``: a call that hangs would hold one of its few threads, and the process at its end. A thread
    of a cancelled call is left behind.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[list[T], BaseException | None]] = loop.create_future()

    def finish(result: list[T], error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))

    def tell(result: list[T], error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, error)

    def run() -> None:
        try:
            tell([work()], None)
        except BaseException as error:  # supervision point: raised to the caller, SystemExit too
            tell([], error)

    threading.Thread(target=run, name="environment", daemon=True).start()
    result, error = await done
    if error is not None:
        raise error
    return result[0]
