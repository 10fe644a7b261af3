"""Budget of restarts per time: a long run outlives any fixed number of failures."""

from __future__ import annotations

from collections import deque

from miles_async.runtime.clock import now


class RestartBudget:
    """At most ``count`` restarts in any ``window`` seconds."""

    def __init__(self, count: int, window: float) -> None:
        self.count = count
        self.window = window
        self._times: deque[float] = deque()

    def take(self) -> bool:
        """Count a restart now and return True; return False, counting nothing, if the budget is used up."""
        while self._times and self._times[0] <= now() - self.window:
            self._times.popleft()
        if len(self._times) >= self.count:
            return False
        self._times.append(now())
        return True

    def __str__(self) -> str:
        return f"{self.count} times in {self.window:g} s"
