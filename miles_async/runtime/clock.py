"""The event loop's clock: monotonic seconds, virtual in a simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


def now() -> float:
    """Seconds on the running loop's clock; only differences are meaningful."""
    return asyncio.get_running_loop().time()


class Stopwatch:
    """Seconds spent, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds inside to ``name``."""
        started = now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + now() - started

    def metrics(self, group: str) -> dict[str, float]:
        """The same as metrics, ``GROUP/NAME_seconds``."""
        return {f"{group}/{name}_seconds": seconds for name, seconds in self.seconds.items()}
