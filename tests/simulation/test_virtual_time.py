"""The clock jumps, nothing else changes: order, deadlines and errors are asyncio's."""

from __future__ import annotations

import asyncio
import time

import pytest

from miles_async.errors import StalledError
from miles_async.simulation.virtual_time import VirtualTimeLoop, run_in_virtual_time


def test_an_hour_of_waiting_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    started = time.monotonic()
    assert run_in_virtual_time(main()) == 3600
    assert time.monotonic() - started < 60


def test_deadlines_pass_in_order() -> None:
    async def main() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await asyncio.sleep(3)
        async with asyncio.timeout(2):
            return await asyncio.to_thread(lambda: "computed")

    assert run_in_virtual_time(main()) == "computed"


@pytest.mark.parametrize("others", range(8))
def test_timers_of_one_moment_go_off_in_the_order_in_which_they_were_set(others: int) -> None:
    async def main() -> list[int]:
        loop, seen = asyncio.get_running_loop(), list[int]()
        for number in range(12):
            loop.call_at(5.0, seen.append, number)
            if number < others:
                loop.call_at(1.0 + number, int)  # moves the others about in the loop's heap
        await asyncio.sleep(6.0)
        return seen

    assert run_in_virtual_time(main()) == list(range(12))


def test_an_error_in_a_thread_is_raised_where_it_is_awaited() -> None:
    async def main() -> None:
        await asyncio.to_thread(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        run_in_virtual_time(main())


def test_a_deadlock_is_an_error_that_names_who_waits_where() -> None:
    # covers: C10
    async def wait_forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StalledError, match=r"deadlock.*test_a_deadlock.*wait_forever"):
        run_in_virtual_time(wait_forever())


def test_the_limit_of_virtual_time_is_an_error() -> None:
    async def tick() -> None:
        for _ in range(1000):
            await asyncio.sleep(1)

    with pytest.raises(StalledError, match="not done within 10 s"):
        run_in_virtual_time(tick(), limit_seconds=10)


def test_a_task_can_be_cancelled_at_any_iteration() -> None:
    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert isinstance(loop, VirtualTimeLoop)
        loop.at_iteration(loop.iterations + 5, task.cancel)
        for _ in range(100):
            await asyncio.sleep(1)

    with pytest.raises(asyncio.CancelledError):
        run_in_virtual_time(main())
