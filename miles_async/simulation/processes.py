"""CPU time of the processes that take answers, under virtual time: a rollout process has one event loop on one core.

What engines and trainer do meanwhile does not wait for it; answers do, one behind the other.
"""

from __future__ import annotations

import asyncio
import heapq

from miles_async.simulation.settings import SimulationSettings


class Processes:
    """Processes that each do one thing at a time. Work is done in the order of arrival, by the first that is free."""

    def __init__(self, count: int) -> None:
        self.busy_seconds = 0.0
        self.lags: list[float] = []  # seconds that each piece of work that is done waited for its turn
        self._free = [0.0] * count  # a heap: when each process has done what it was given

    async def work(self, seconds: float) -> None:
        """Wait until a process has worked for so long."""
        if not seconds:
            return
        now = asyncio.get_running_loop().time()
        start = max(now, self._free[0])
        heapq.heapreplace(self._free, start + seconds)
        await asyncio.sleep(start + seconds - now)
        self.busy_seconds += seconds
        self.lags.append(start - now)


class AnswerCosts:
    """CPU time of an answer: in a client process where there are any, then in the rollout process."""

    def __init__(self, settings: SimulationSettings) -> None:
        count = settings.engines.rollout_client_processes
        self.rollout = Processes(1)
        self._clients = Processes(count)
        self._client_seconds = settings.client_cpu_seconds if count else 0.0
        self._rollout_seconds = settings.rollout_cpu_seconds

    async def take(self) -> None:
        """Wait until an answer has been taken."""
        await self._clients.work(self._client_seconds)
        await self.rollout.work(self._rollout_seconds)
