"""A few at a time, per turn of the event loop: what takes half a millisecond each would block it for half a second if a
thousand did it in one turn.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Who awaits :meth:`turn` goes on at once, or in one of the next turns of the loop, in order."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ticking = False  # the next turn is counted

    async def turn(self) -> None:
        """Returns when it is the caller's turn."""
        if self._left == 0 or self._waiting:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        else:
            self._left -= 1
            self._tick_soon()

    def _tick_soon(self) -> None:
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._left = self._at_once
        while self._waiting and self._left:
            waiting = self._waiting.popleft()
            if not waiting.done():  # else cancelled
                waiting.set_result(None)
                self._left -= 1
        if self._left < self._at_once:
            self._tick_soon()
