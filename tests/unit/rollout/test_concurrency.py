"""Changes of the limit: engines that come and go, and the load that they report.

# covers: C4
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from miles_async.arguments import RolloutArguments
from miles_async.rollout.concurrency import (
    DECREASE,
    OBSERVATION_SECONDS,
    ROUNDS_TO_CAP,
    AdaptiveConcurrency,
    Concurrency,
    ConcurrencyLimit,
)
from miles_async.simulation.virtual_time import run_in_virtual_time
from miles_async.types import EngineLoad
from tests.fakes.fake_sides import FakeEngineLoads

CAP = 128
IDLE = EngineLoad(running=20, waiting=0, kv_use=0.5)
QUEUEING = EngineLoad(running=20, waiting=10, kv_use=0.5)
NEARLY_FULL = EngineLoad(running=20, waiting=0, kv_use=0.95)
STEP = CAP / ROUNDS_TO_CAP


# ------------------------------------------------------------------------------------------------- limit
async def test_a_lower_limit_leaves_alone_who_is_in_and_lets_in_nobody_until_it_is_kept() -> None:
    limit = ConcurrencyLimit(3)
    inside: list[int] = []
    leave = [asyncio.Event() for _ in range(5)]

    async def visit(visitor: int) -> None:
        async with limit:
            inside.append(visitor)
            await leave[visitor].wait()
            inside.remove(visitor)

    async with asyncio.TaskGroup() as scope:
        for visitor in range(5):
            scope.create_task(visit(visitor))
        await asyncio.sleep(0)
        assert inside == [0, 1, 2]
        limit.resize(1)
        for visitor in (0, 1):
            leave[visitor].set()
            await asyncio.sleep(0.001)
        assert inside == [2]
        limit.resize(3)
        await asyncio.sleep(0)
        assert inside == [2, 3, 4]
        for event in leave:
            event.set()
    assert (limit.in_use, limit.finished) == (0, 5)


# -------------------------------------------------------------------------------------------- controller
def observe(adaptive: AdaptiveConcurrency, *loads: EngineLoad, rounds: float = 1.0, in_use: int = 100) -> float:
    """The change by one observation of engines e0, e1, ... at a limit of 100; ``rounds`` times ``in_use`` finished."""
    before = adaptive.per_engine
    by_engine = {f"e{index}": load for index, load in enumerate(loads)}
    return adaptive.observe(by_engine, limit=100, in_use=in_use, finished=round(in_use * rounds)) - before


@pytest.fixture
def adaptive() -> AdaptiveConcurrency:
    """In the middle of its range, and it has seen an engine that idles."""
    controller = AdaptiveConcurrency(CAP, kv_use_target=0.9)
    controller.per_engine = 64.0
    observe(controller, IDLE, in_use=0)
    return controller


def test_it_starts_at_the_cap_and_never_passes_it() -> None:
    controller = AdaptiveConcurrency(CAP, kv_use_target=0.9)
    observe(controller, IDLE)
    assert controller.per_engine == CAP


def test_it_stays_below_another_cap(adaptive: AdaptiveConcurrency) -> None:
    adaptive.limit_to(8)
    assert adaptive.per_engine == 8.0
    observe(adaptive, IDLE)
    assert adaptive.per_engine == 8.0
    adaptive.limit_to(CAP)  # it grows again by itself
    assert adaptive.per_engine == 8.0
    assert observe(adaptive, IDLE) == STEP


def test_room_raises_it_by_a_constant_in_a_round(adaptive: AdaptiveConcurrency) -> None:
    assert observe(adaptive, IDLE) == STEP
    assert observe(adaptive, IDLE, rounds=0.5) == STEP / 2
    assert observe(adaptive, IDLE, rounds=0.0) == 0
    assert observe(adaptive, IDLE, rounds=7.0) == STEP  # nothing is known of the rounds in between


def test_a_small_cap_is_reached_in_steps_of_one() -> None:
    controller = AdaptiveConcurrency(8, kv_use_target=0.9)
    controller.per_engine = 2.0
    assert observe(controller, IDLE) == 1.0


@pytest.mark.parametrize("load", [QUEUEING, NEARLY_FULL])
def test_a_full_engine_lowers_it_by_a_share_in_a_round(adaptive: AdaptiveConcurrency, load: EngineLoad) -> None:
    assert observe(adaptive, load, rounds=0.5) == -64 * DECREASE / 2
    for _ in range(50):
        observe(adaptive, load)
    assert adaptive.per_engine == 1.0


def test_an_unused_limit_is_not_raised_but_lowered(adaptive: AdaptiveConcurrency) -> None:
    assert observe(adaptive, IDLE, in_use=50) == 0
    assert observe(adaptive, QUEUEING, in_use=50) == -64 * DECREASE
    adaptive.observe({"e0": QUEUEING}, limit=100, in_use=0, finished=5)  # all at once: no round to divide by


def test_a_queue_that_an_engine_is_taking_in_is_neither_full_nor_room(adaptive: AdaptiveConcurrency) -> None:
    """So it is after a publication that retracted what ran, and after a burst."""
    for running in (30, 40, 50):
        assert observe(adaptive, EngineLoad(running=running, waiting=90 - running, kv_use=0.5)) == 0
    assert observe(adaptive, EngineLoad(running=50, waiting=40, kv_use=0.5)) < 0


def test_a_few_that_wait_for_the_next_prefill_are_no_queue(adaptive: AdaptiveConcurrency) -> None:
    assert observe(adaptive, EngineLoad(running=20, waiting=1, kv_use=0.5)) == STEP
    assert observe(adaptive, EngineLoad(running=20, waiting=2, kv_use=0.5)) < 0


def test_the_first_queue_of_an_engine_says_nothing_yet(adaptive: AdaptiveConcurrency) -> None:
    assert observe(adaptive, IDLE, QUEUEING) == STEP / 2  # half of the engines have room


def test_a_nearly_full_engine_without_a_queue_has_no_room(adaptive: AdaptiveConcurrency) -> None:
    assert observe(adaptive, NEARLY_FULL) == -64 * DECREASE


def test_every_engine_counts_by_its_share(adaptive: AdaptiveConcurrency) -> None:
    adaptive.observe({f"e{index}": IDLE for index in range(4)}, limit=100, in_use=0, finished=0)
    change = observe(adaptive, QUEUEING, IDLE, IDLE, IDLE)
    assert change == pytest.approx((3 * STEP - 64 * DECREASE) / 4)


# --------------------------------------------------------------------------------------- following engines
@contextmanager
def followed(concurrency: Concurrency) -> Iterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(concurrency.run())
    yield task
    task.cancel()


def test_the_limit_follows_the_engines_that_serve() -> None:
    async def main() -> None:
        engines = FakeEngineLoads(serving=0)
        concurrency = Concurrency(engines, RolloutArguments(rollout_concurrency_per_engine=5))
        with followed(concurrency):
            seen = [concurrency.slots.limit]
            for serving in (3, 2, 0, 1):
                engines.serve(serving)
                await asyncio.sleep(0.001)
                seen.append(concurrency.slots.limit)
        assert seen == [5, 15, 10, 5, 5]  # without engines as with one: who is let in meets the client's deadline

    run_in_virtual_time(main())


def test_without_the_flag_load_changes_nothing() -> None:
    async def main() -> int:
        engines = FakeEngineLoads(serving=2)
        engines.engines = {"e0": QUEUEING, "e1": QUEUEING}
        concurrency = Concurrency(engines, RolloutArguments(rollout_concurrency_per_engine=5))
        with followed(concurrency):
            for _ in range(100):
                async with concurrency.slots:
                    await asyncio.sleep(OBSERVATION_SECONDS)
        return concurrency.slots.limit

    assert run_in_virtual_time(main()) == 10


def test_with_the_flag_it_follows_load_and_engines() -> None:
    async def main() -> None:
        engines = FakeEngineLoads(serving=2)
        arguments = RolloutArguments(
            rollout_concurrency_per_engine=64, adaptive_rollout_concurrency=True, rollout_kv_use_target=0.4
        )
        concurrency = Concurrency(engines, arguments)
        slots = concurrency.slots

        async def visit() -> None:
            while True:
                async with slots:
                    await asyncio.sleep(OBSERVATION_SECONDS)

        async with asyncio.TaskGroup() as scope:
            tasks = [scope.create_task(visit()) for _ in range(200)]
            with followed(concurrency):
                await asyncio.sleep(10 * OBSERVATION_SECONDS)
                assert slots.limit == 128  # nobody answers, nothing is known
                engines.engines = {"e0": IDLE, "e1": IDLE}  # above the target
                await asyncio.sleep(4.5 * OBSERVATION_SECONDS)
                lowered = slots.limit
                assert 25 < lowered < 60  # three quarters, four or five times
                engines.serve(1)
                await asyncio.sleep(0)
                assert slots.limit == lowered // 2
                engines.engines = {"e0": EngineLoad(running=20, waiting=0, kv_use=0.3)}
                await asyncio.sleep(100 * OBSERVATION_SECONDS)
                assert slots.limit == slots.in_use == 64
            for task in tasks:
                task.cancel()

    run_in_virtual_time(main())
