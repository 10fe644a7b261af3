"""The contents of ``stall.txt``.

# covers: C10
"""

from __future__ import annotations

import asyncio

from miles_async.engines.registry import EngineRegistry
from miles_async.runtime.stall_report import waiting_tasks
from miles_async.simulation.run import Simulation, quiet_logs, seeded
from miles_async.simulation.virtual_time import run_in_virtual_time
from tests.simulation.scenario import settings


async def test_tasks_are_counted_by_the_call_of_ours_that_they_wait_in() -> None:
    registry = EngineRegistry()

    async def wait() -> None:
        await registry.wait_until(lambda: False)

    tasks = [asyncio.create_task(wait()) for _ in range(3)]
    tasks.append(asyncio.create_task(asyncio.sleep(60), name="sleeper"))
    await asyncio.sleep(0)
    first, second = waiting_tasks()
    assert first.startswith("3 × task: EngineRegistry.wait_until:")
    assert second == "1 × sleeper: nothing of ours"
    for task in tasks:
        task.cancel()


def test_the_rollout_manager_says_who_waits_for_whom() -> None:
    async def look() -> str:
        simulation = Simulation(settings(steps=3))
        task = asyncio.create_task(simulation.run())
        await asyncio.sleep(6.5)  # engines are up after 5 s; responses take about one
        try:
            return await simulation.manager.describe()
        finally:
            task.cancel()
            await asyncio.wait([task])

    with quiet_logs(), seeded(0):
        text = run_in_virtual_time(look(), limit_seconds=100)
    lines = text.splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == ["pool", "engines", "requests", "services", "live attempts", "tasks"]
    assert "attempts in flight" in lines[1]
    assert "engine-0 serving" in text
    assert any("in_flight, issued under version 0" in line for line in lines)
    assert any("× cut for step 0: " in line or "Dispatcher" in line for line in lines)
