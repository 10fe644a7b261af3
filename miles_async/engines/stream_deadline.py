"""The deadline of engines that receive a stream of weights, which is known only when the senders are through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from miles_async.errors import EngineTimeoutError


class StreamDeadline:
    """One deadline for several engines."""

    def __init__(self, longest: float) -> None:
        """``longest``: seconds if the senders never say that they are through."""
        self.longest = longest
        self._granted: float | None = None  # seconds after the senders were through
        self._limits: set[asyncio.Timeout] = set()  # of the engines that have not answered

    @asynccontextmanager
    async def of(self, url: str) -> AsyncIterator[None]:
        """Wait for the answer of the engine at ``url``. Raises EngineTimeoutError past the deadline."""
        try:
            async with asyncio.timeout(self._granted) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            raise EngineTimeoutError(
                f"{url} waits for weights: no answer within {self._granted:g} s after the senders were through"
            ) from None

    def expire_in(self, seconds: float) -> None:
        """The senders are through: grant the engines that have not answered so many seconds from now on."""
        self._granted = seconds
        when = asyncio.get_running_loop().time() + seconds
        for limit in self._limits:
            limit.reschedule(when)
