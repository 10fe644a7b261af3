"""Limit on samples in flight: a limit per engine, fixed or adapted, times the number of serving engines.

A request that an engine has taken cannot be called back. So the limit takes effect where a slot changes hands: raising
it admits waiting samples at once; lowering it ends none, and admits none until usage is below it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from miles_async.arguments.rollout import RolloutArguments
from miles_async.types import EngineLoad

OBSERVATION_SECONDS = 2.0
QUEUE_SHARE = 1 / 16  # of the running ones: fewer requests than that only wait for the next prefill
DECREASE = 1 / 4  # of the limit, in one round of responses
ROUNDS_TO_CAP = 64  # the increase of one round is so small a part of the cap, and at least 1


class EngineLoads(Protocol):
    """Number and load of the engines that generate; the dispatcher's concurrency follows it."""

    async def serving(self, other_than: int) -> int:
        """Wait until the number of serving engines is not ``other_than``, and return it."""
        ...

    async def loads(self) -> Mapping[str, EngineLoad]:
        """Load of each engine that takes requests, by id. Engines that do not answer within seconds are left out."""
        ...


class ConcurrencyLimit:
    """``async with limit``: at most ``limit`` at once, first come first served.

    A free slot belongs to the first waiter at once, whenever its task runs next: no other overtakes it, and if it was
    cancelled meanwhile the slot goes to the next.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0  # more than the limit while a lowered one takes effect
        self.finished = 0  # slots given back so far
        self._waiting: deque[asyncio.Future[None]] = deque()  # a cancelled one goes when it is its turn

    async def __aenter__(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it already had its slot
                self._give_back()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._give_back()

    def resize(self, limit: int) -> None:
        """Change the limit, up or down; nothing under way is ended."""
        self.limit = limit
        self._let_in()

    def _give_back(self) -> None:
        self.in_use -= 1
        self.finished += 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.in_use < self.limit:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                turn.set_result(None)
                self.in_use += 1


class AdaptiveConcurrency:
    """Additive increase, multiplicative decrease of the limit per engine, as TCP finds what a path holds (RFC 5681).

    An engine is *full* when its KV cache is used beyond the target, so that requests are about to be retracted, or when
    requests queue and it runs no more than before: one that is still taking in a burst, or what a publication
    retracted, is not. It has *room* when hardly any request queues. The limit goes down by the share of engines that
    are full and up by the share that have room, so that one slow engine doesn't starve the others; up only while all
    of it is in use, else it would be far too high when it is needed.

    The clock is TCP's too: a round is the time in which as many samples finish as are under way. What a change did
    shows only when a round is over, be that after seconds or after an hour.
    """

    def __init__(self, cap: int, kv_use_target: float) -> None:
        self.per_engine = float(cap)  # between 1 and the cap
        self._cap = cap
        self._kv_use_target = kv_use_target
        self._before: Mapping[str, EngineLoad] = {}

    def limit_to(self, cap: int) -> None:
        """Set another cap."""
        self._cap = cap
        self.per_engine = min(self.per_engine, float(cap))

    def observe(self, loads: Mapping[str, EngineLoad], *, limit: int, in_use: int, finished: int) -> float:
        """The new limit per engine.

        ``loads``: of engines that answered, at least one. ``limit``, ``in_use``: samples over all engines, now.
        ``finished``: samples since the last observation.
        """
        full = {engine for engine, load in loads.items() if self._is_full(load, self._before.get(engine))}
        room = {engine for engine, load in loads.items() if not _queues(load)} - full
        self._before = loads
        change = -DECREASE * self.per_engine * len(full)
        if in_use >= limit:
            change += max(1.0, self._cap / ROUNDS_TO_CAP) * len(room)
        rounds = min(1.0, finished / max(1, in_use))
        self.per_engine = min(float(self._cap), max(1.0, self.per_engine + rounds * change / len(loads)))
        return self.per_engine

    def _is_full(self, load: EngineLoad, before: EngineLoad | None) -> bool:
        takes_no_more = before is not None and load.running <= before.running
        return load.kv_use > self._kv_use_target or (_queues(load) and takes_no_more)


def _queues(load: EngineLoad) -> bool:
    return load.waiting > QUEUE_SHARE * load.running


class Concurrency:
    """The limit in force. :meth:`run` makes it follow the engines."""

    def __init__(self, engines: EngineLoads, arguments: RolloutArguments) -> None:
        self._engines = engines
        self._serving = 0
        self._per_engine = float(arguments.rollout_concurrency_per_engine)
        self._adaptive = (
            AdaptiveConcurrency(arguments.rollout_concurrency_per_engine, arguments.rollout_kv_use_target)
            if arguments.adaptive_rollout_concurrency
            else None
        )
        self.slots = ConcurrencyLimit(self._total())

    async def run(self) -> None:
        """Adapt the limit until cancelled."""
        async with asyncio.TaskGroup() as scope:
            scope.create_task(self._follow_engines())
            if self._adaptive is not None:
                scope.create_task(self._adapt(self._adaptive))

    def change(self, per_engine: int) -> None:
        """Apply another ``--rollout-concurrency-per-engine``; nothing under way is ended."""
        self._per_engine = float(per_engine)
        if self._adaptive is not None:
            self._adaptive.limit_to(per_engine)
            self._per_engine = self._adaptive.per_engine
        self.slots.resize(self._total())

    def _total(self) -> int:
        # Without engines, as many as for one: the client's deadline only runs for admitted samples.
        return int(self._per_engine * max(1, self._serving))

    async def _follow_engines(self) -> None:
        while True:
            self._serving = await self._engines.serving(self._serving)
            self.slots.resize(self._total())

    async def _adapt(self, adaptive: AdaptiveConcurrency) -> None:
        seen = self.slots.finished
        while True:
            await asyncio.sleep(OBSERVATION_SECONDS)
            if not (loads := await self._engines.loads()):
                continue
            finished, seen = self.slots.finished - seen, self.slots.finished
            self._per_engine = adaptive.observe(
                loads, limit=self.slots.limit, in_use=self.slots.in_use, finished=finished
            )
            self.slots.resize(self._total())
