"""The limit under any order of events, and the controller against engines that don't tell what they hold.

# covers: C4
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from statistics import fmean

from hypothesis import given, settings
from hypothesis import strategies as st

from miles_async.rollout.concurrency import AdaptiveConcurrency, ConcurrencyLimit
from miles_async.simulation.virtual_time import VirtualTimeLoop, run_in_virtual_time
from miles_async.types import EngineLoad

TIMES = st.integers(0, 12)  # few, so that much happens in the same moment


# ------------------------------------------------------------------------------------------------- limit
@dataclass
class Crowd:
    """Tasks that share a limit."""

    limit: ConcurrencyLimit
    asked: list[int] = field(default_factory=list)
    entered: dict[int, float] = field(default_factory=dict)  # visitor → when
    given_up: int = 0  # cancelled before they entered
    inside: int = 0
    most_inside: int = 0

    async def visit(self, visitor: int, start: float, stay: float) -> None:
        await asyncio.sleep(start)
        self.asked.append(visitor)
        try:
            async with self.limit:
                self.entered[visitor] = asyncio.get_running_loop().time()
                self.inside += 1
                self.most_inside = max(self.most_inside, self.inside)
                try:
                    await asyncio.sleep(stay)
                finally:
                    self.inside -= 1
        finally:
            self.given_up += visitor not in self.entered

    @property
    def waiting(self) -> int:
        return len(self.asked) - len(self.entered) - self.given_up


@given(
    first=st.integers(1, 3),
    visits=st.lists(st.tuples(TIMES, st.integers(0, 3), st.none() | TIMES), max_size=12),
    resizes=st.dictionaries(TIMES, st.integers(1, 5), max_size=5),
)
def test_nobody_waits_while_there_is_room_and_nobody_is_overtaken(
    first: int, visits: list[tuple[int, int, int | None]], resizes: dict[int, int]
) -> None:
    async def main() -> None:
        loop, crowd = asyncio.get_running_loop(), Crowd(ConcurrencyLimit(first))
        async with asyncio.TaskGroup() as scope:
            for visitor, (start, stay, cancelled) in enumerate(visits):
                task = scope.create_task(crowd.visit(visitor, start, stay))
                if cancelled is not None:
                    loop.call_at(cancelled, task.cancel)
            for when, limit in resizes.items():
                loop.call_at(when, crowd.limit.resize, limit)
            allowed = first
            for moment in range(60):  # between the moments in which something happens
                await asyncio.sleep(moment + 0.5 - loop.time())
                assert crowd.limit.in_use == crowd.inside <= max(crowd.limit.limit, allowed)
                assert crowd.waiting == 0 or crowd.inside >= crowd.limit.limit
                allowed = max(crowd.limit.limit, crowd.inside)  # until the next resize, and what it leaves alone
        assert crowd.inside == crowd.waiting == 0
        moments = [crowd.entered[visitor] for visitor in crowd.asked if visitor in crowd.entered]
        assert moments == sorted(moments)
        assert all(visitor in crowd.entered for visitor, visit in enumerate(visits) if visit[2] is None)

    run_in_virtual_time(main())


def test_a_waiter_cancelled_at_any_turn_of_the_loop_takes_no_slot_along() -> None:
    def whole(iteration: int | None) -> int:
        async def main() -> int:
            loop, crowd = asyncio.get_running_loop(), Crowd(ConcurrencyLimit(1))
            assert isinstance(loop, VirtualTimeLoop)
            tasks = [asyncio.ensure_future(crowd.visit(visitor, 0, 1)) for visitor in range(4)]
            if iteration is not None:
                loop.at_iteration(iteration, tasks[1].cancel)
            await asyncio.gather(*tasks, return_exceptions=True)
            assert list(crowd.entered) in ([0, 1, 2, 3], [0, 2, 3])
            assert crowd.most_inside == 1
            assert crowd.limit.in_use == crowd.waiting == 0
            return loop.iterations

        return run_in_virtual_time(main())

    for iteration in range(1, whole(None)):
        whole(iteration)


# -------------------------------------------------------------------------------------------- controller
LOADS = st.builds(
    EngineLoad, running=st.integers(0, 300), waiting=st.integers(0, 300), kv_use=st.floats(0, 1, allow_nan=False)
)
OBSERVATIONS = st.tuples(
    st.dictionaries(st.sampled_from("abc"), LOADS, min_size=1),
    st.integers(1, 900),
    st.integers(0, 900),
    st.integers(0, 2000),
)


@given(st.integers(1, 300), st.lists(OBSERVATIONS, max_size=30))
def test_the_limit_keeps_between_one_and_the_cap_and_moves_only_for_a_reason(
    cap: int, observations: list[tuple[dict[str, EngineLoad], int, int, int]]
) -> None:
    adaptive = AdaptiveConcurrency(cap, kv_use_target=0.9)
    for loads, limit, in_use, finished in observations:
        before = adaptive.per_engine
        after = adaptive.observe(loads, limit=limit, in_use=in_use, finished=finished)
        assert 1 <= after <= cap
        if all(load.waiting == 0 and load.kv_use <= 0.9 for load in loads.values()):
            assert after >= before
        if all(load.kv_use > 0.9 for load in loads.values()) or in_use < limit:
            assert after <= before
        if finished == 0:
            assert after == before


@dataclass
class Engine:
    """Requests grow by a token per tick; those that don't fit are put back, the youngest first."""

    kv_tokens: int
    slots: int
    running: list[list[int]] = field(default_factory=list)  # [tokens now, tokens at the end]
    queue: list[list[int]] = field(default_factory=list)

    def tick(self) -> int:
        """Requests that finished."""
        while self.queue and len(self.running) < self.slots and self.used + self.queue[0][0] <= 0.95 * self.kv_tokens:
            self.running.append(self.queue.pop(0))
        while self.used + len(self.running) > self.kv_tokens:
            self.queue.insert(0, self.running.pop())
        for request in self.running:
            request[0] += 1
        finished = [request for request in self.running if request[0] >= request[1]]
        self.running = [request for request in self.running if request[0] < request[1]]
        return len(finished)

    @property
    def used(self) -> int:
        return sum(now for now, _ in self.running)

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self.running), waiting=len(self.queue), kv_use=self.used / self.kv_tokens)


@settings(max_examples=40)
@given(
    capacity=st.integers(8, 48),
    overcommitment=st.sampled_from([1, 2, 6]),
    engines=st.integers(1, 3),
    length=st.integers(8, 40),
    ticks=st.integers(1, 3),
    by_slots=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_finds_what_engines_hold(
    capacity: int, overcommitment: int, engines: int, length: int, ticks: int, by_slots: bool, seed: int
) -> None:
    """``capacity``: requests of random lengths that an engine holds, by its slots or on average by its KV cache."""
    chance = random.Random(seed)
    mean_tokens = length * 7 / 12  # over a life, of lengths that are uniform between 0.5 and 1.5
    kv_tokens = 10**9 if by_slots else int(capacity * mean_tokens)
    fleet = {f"e{index}": Engine(kv_tokens, capacity if by_slots else 10**9) for index in range(engines)}
    adaptive = AdaptiveConcurrency(cap=overcommitment * capacity, kv_use_target=0.9)
    in_use, limits = 0, []
    rounds = 20 + 8 * overcommitment
    for _ in range(2 * rounds * length // ticks):
        limit = int(adaptive.per_engine * engines)
        finished = 0
        for _ in range(ticks):
            while in_use < limit:
                least = min(fleet.values(), key=lambda engine: len(engine.running) + len(engine.queue))
                least.queue.append([0, max(2, int(length * chance.uniform(0.5, 1.5)))])
                in_use += 1
            done = sum(engine.tick() for engine in fleet.values())
            in_use -= done
            finished += done
        loads = {name: engine.load() for name, engine in fleet.items()}
        limits.append(adaptive.observe(loads, limit=limit, in_use=limit, finished=finished))
    assert 0.8 < fmean(limits[len(limits) // 2 :]) / capacity < 1.2
