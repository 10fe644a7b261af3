"""The rollout process and its client processes as cores on which answers wait for each other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_async.arguments import EnginesArguments
from miles_async.simulation.distributions import Fixed, LogNormal
from miles_async.simulation.processes import Processes
from miles_async.simulation.result import SimulationResult
from miles_async.simulation.run import simulate
from miles_async.simulation.virtual_time import run_in_virtual_time
from tests.simulation.scenario import settings

COST = 0.5  # seconds of CPU per sample, where 4 slots of 1 s and more would make three samples per second


def simulated(*, clients: int = 0, **costs: float) -> SimulationResult:
    options: dict[str, Any] = {
        "engines": EnginesArguments(rollout_client_processes=clients),
        "response_seconds": LogNormal(1.0, 0.2),
        "train_seconds": Fixed(0.1),
        "trace": False,
    }
    return simulate(settings(bound=8, **options, **costs))


def samples_per_second(result: SimulationResult) -> float:
    return result.samples_per_step / result.step_seconds


def test_work_waits_for_its_turn_at_the_first_process_that_is_free() -> None:
    ended: list[tuple[str, float]] = []

    async def three() -> Processes:
        processes = Processes(2)

        async def work(name: str, seconds: float) -> None:
            await processes.work(seconds)
            ended.append((name, asyncio.get_running_loop().time()))

        async with asyncio.TaskGroup() as scope:
            for name, seconds in (("long", 5.0), ("short", 1.0), ("third", 2.0), ("none", 0.0)):
                scope.create_task(work(name, seconds))
        return processes

    processes = run_in_virtual_time(three())
    assert ended == [("none", 0.0), ("short", 1.0), ("third", 3.0), ("long", 5.0)]
    assert processes.lags == [0.0, 1.0, 0.0], "in the order in which work was done"
    assert processes.busy_seconds == 8.0


def test_a_rollout_process_bounds_the_samples_per_second_and_says_so() -> None:
    free, bound = simulated(), simulated(rollout_cpu_seconds=COST)
    assert samples_per_second(free) > 2.5
    assert free.answer_lags == []
    assert samples_per_second(bound) == pytest.approx(1 / COST, rel=0.05)
    assert max(bound.answer_lags) > COST
    assert bound.rollout_cpu_seconds == pytest.approx(COST * len(bound.answer_lags))
    assert len(bound.answer_lags) >= bound.samples


def test_client_processes_take_their_part_of_the_cost_side_by_side() -> None:
    one = simulated(clients=1, rollout_cpu_seconds=0.1, client_cpu_seconds=2 * COST)
    two = simulated(clients=2, rollout_cpu_seconds=0.1, client_cpu_seconds=2 * COST)
    assert samples_per_second(one) == pytest.approx(1 / (2 * COST), rel=0.05)
    assert samples_per_second(two) > 1.5 * samples_per_second(one)
    assert samples_per_second(simulated(client_cpu_seconds=COST)) == samples_per_second(simulated())
