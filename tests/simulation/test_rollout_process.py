"""The rollout process as a core on which answers wait for each other."""

from __future__ import annotations

import asyncio

import pytest

from miles_async.simulation.distributions import Fixed, LogNormal
from miles_async.simulation.hooks import RolloutProcess
from miles_async.simulation.result import SimulationResult
from miles_async.simulation.run import simulate
from miles_async.simulation.virtual_time import run_in_virtual_time
from tests.simulation.scenario import settings

COST = 0.5  # seconds of CPU per sample, where 4 slots of 1 s and more would make three samples per second


def simulated(cost: float = 0.0) -> SimulationResult:
    return simulate(
        settings(
            bound=8,
            response_seconds=LogNormal(1.0, 0.2),
            train_seconds=Fixed(0.1),
            trace=False,
            rollout_cpu_seconds=cost,
        )
    )


def samples_per_second(result: SimulationResult) -> float:
    return result.samples_per_step / result.step_seconds


def test_answers_are_taken_one_after_another() -> None:
    ended: list[tuple[str, float]] = []

    async def three() -> RolloutProcess:
        process = RolloutProcess(2.0)

        async def take(name: str, after: float) -> None:
            await asyncio.sleep(after)
            await process.take()
            ended.append((name, asyncio.get_running_loop().time()))

        async with asyncio.TaskGroup() as scope:
            for name, after in (("first", 0.0), ("second", 1.0), ("late", 10.0)):
                scope.create_task(take(name, after))
        return process

    process = run_in_virtual_time(three())
    assert ended == [("first", 2.0), ("second", 4.0), ("late", 12.0)]
    assert process.lags == [0.0, 1.0, 0.0]
    assert process.busy_seconds == 6.0


def test_a_rollout_process_bounds_the_samples_per_second_and_says_so() -> None:
    free, bound = simulated(), simulated(COST)
    assert samples_per_second(free) > 2.5
    assert free.answer_lags == []
    assert samples_per_second(bound) == pytest.approx(1 / COST, rel=0.05)
    assert max(bound.answer_lags) > COST
    assert bound.rollout_cpu_seconds == pytest.approx(COST * len(bound.answer_lags))
    assert len(bound.answer_lags) >= bound.samples
