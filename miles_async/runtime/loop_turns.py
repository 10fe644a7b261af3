"""Resume coroutines a few per turn of the event loop.

Work of half a millisecond each would block the loop for half a second if a thousand did it in one turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LoopTurns:
    """Resumes waiting coroutines in order of arrival, at most ``at_once`` per turn of the loop."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._left = at_once  # in this turn of the loop
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._ticking = False  # the next turn is counted

    async def turn(self) -> None:
        """Return at once if this turn of the loop has room, else in one of the next."""
        if self._left:
            self._left -= 1
            self._tick_soon()
        else:
            await self._wait(lambda: True)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return at once if ``condition()`` holds, else in one of the turns after a :meth:`notify` that finds it true.

        The condition must not raise.
        """
        while not condition():
            await self._wait(condition)

    def notify(self) -> None:
        """Evaluate the conditions again, in the next turn of the loop."""
        if self._waiting:
            self._tick_soon()

    async def _wait(self, condition: Callable[[], bool]) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = condition
        try:
            await waiting
        finally:
            del self._waiting[waiting]

    def _tick_soon(self) -> None:
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._left = self._at_once
        for waiting, condition in self._waiting.items():
            if not self._left:
                break
            if not waiting.done() and condition():  # done: cancelled, or woken and not run yet
                waiting.set_result(None)
                self._left -= 1
        if self._left < self._at_once:
            self._tick_soon()
