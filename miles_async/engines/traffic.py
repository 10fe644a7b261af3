"""Requests in flight, and the time with at least one: the rollout side's idle fraction."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Traffic:
    """Requests at an engine or the router, not those waiting on the client."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.completed: Counter[str] = Counter()  # engine id → answers
        self.failed = 0  # tries that ended with an error
        self._clock = clock
        self._started: dict[str, float] = {}  # request id → start; oldest first
        self._dispatched: dict[str, int] = {}  # routing key → version of its last request
        self._busy_seconds = 0.0
        self._busy_since = 0.0

    @property
    def in_flight(self) -> int:
        return len(self._started)

    @contextmanager
    def request(self, request_id: str, routing_key: str = "", version: int = 0) -> Iterator[None]:
        """Count one request, dispatched under ``version``, while inside."""
        now = self._clock()
        if not self._started:
            self._busy_since = now
        self._started[request_id] = now
        self._dispatched[routing_key] = version
        try:
            yield
        finally:
            del self._started[request_id]
            self._dispatched.pop(routing_key, None)
            if not self._started:
                self._busy_seconds += self._clock() - self._busy_since

    def dispatched(self, routing_key: str) -> int | None:
        """Version under which the key's request in flight was dispatched; for keys with one request at a time."""
        return self._dispatched.get(routing_key)

    def busy_seconds(self) -> float:
        """Seconds with at least one request in flight so far."""
        running = self._clock() - self._busy_since if self._started else 0.0
        return self._busy_seconds + running

    def oldest_seconds(self) -> float:
        """Age of the oldest request in flight."""
        return self._clock() - next(iter(self._started.values())) if self._started else 0.0
