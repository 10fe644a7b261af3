"""CPU time of the rollout process under virtual time: one event loop on one core, on which answers wait.

What engines and trainer do meanwhile does not wait for it.
"""

from __future__ import annotations

import asyncio


class RolloutProcess:
    """Takes answers in the order of arrival, each for ``seconds_per_answer`` of CPU."""

    def __init__(self, seconds_per_answer: float) -> None:
        self.busy_seconds = 0.0
        self.lags: list[float] = []  # seconds that each answer that is taken waited for its turn
        self._seconds = seconds_per_answer
        self._free = 0.0  # when what was given so far is done

    async def take(self) -> None:
        """Wait until an answer has been taken."""
        if not self._seconds:
            return
        now = asyncio.get_running_loop().time()
        start = max(now, self._free)
        self._free = start + self._seconds
        await asyncio.sleep(self._free - now)
        self.busy_seconds += self._seconds
        self.lags.append(start - now)
