"""A thread for blocking work of ours."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
