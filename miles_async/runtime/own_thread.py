"""Threads for blocking work: one for calls of ours, and one for each call that may never return."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial


class OwnThread:
    """One thread, for calls one after another. ``asyncio.to_thread`` has few threads, and users' code that hangs in it
    (a client without a timeout) can take them all.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run[**P, Result](self, call: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """As ``asyncio.to_thread``."""
        bound = partial(contextvars.copy_context().run, call, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, bound)


def in_daemon_thread[Result](call: Callable[[], Result], name: str) -> Future[Result]:
    """Start a call that may never return, in a thread that holds up neither other calls nor the end of the process.

    The future gets whatever the call returns or raises. Cancelling it has no effect: Python cannot end a thread.
    """
    outcome = Future[Result]()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # supervision point: raised to the caller, SystemExit too
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
