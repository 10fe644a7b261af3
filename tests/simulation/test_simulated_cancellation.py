"""The run is cancelled, or a side fails, at every turn of the event loop: nothing is left behind (C2, C10)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from miles_async.errors import TrainerError, first_error
from miles_async.simulation.run import Simulation, quiet_logs, seeded
from miles_async.simulation.settings import CallFault, Crash, Faults, SimulationSettings
from miles_async.simulation.virtual_time import VirtualTimeLoop, run_in_virtual_time
from tests.simulation.scenario import settings

pytestmark = pytest.mark.timeout(600)  # hundreds of runs, one after another

EVENTFUL = Faults(
    crashes=(Crash(at_seconds=8.0, engine=0),),
    calls=(CallFault(engine=1, path="/update_weights_from_distributed", call=3, action="crash"),),
)


@dataclass
class Ending:
    simulation: Simulation | None = None
    error: BaseException | None = None
    iterations: int = 0
    left_over: list[object] = field(default_factory=list)

    def live(self) -> int:
        balance = self.simulation.pool.balance()
        groups = balance.summary()
        assert groups.pop("issued") == sum(groups.values())
        return balance.in_flight + balance.buffered + balance.cut


def interrupted(chosen: SimulationSettings, iteration: int | None, *, error: Exception | None = None) -> Ending:
    """Run, and in that iteration cancel it from outside, or make the trainer's next step fail with ``error``."""
    ending = Ending()

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert isinstance(loop, VirtualTimeLoop)
        simulation = ending.simulation = Simulation(chosen)

        async def fail(shards: object) -> None:
            assert error is not None
            raise error

        if iteration is not None:
            failure = (lambda: setattr(simulation.trainer, "train", fail)) if error else task.cancel
            loop.at_iteration(iteration, failure)
        try:
            await simulation.run()
        finally:
            ending.iterations = loop.iterations
            ending.left_over = [other for other in asyncio.all_tasks() if other is not task]

    with quiet_logs(), seeded(0):
        try:
            run_in_virtual_time(main(), limit_seconds=10_000)
        except BaseException as caught:  # the subject of these tests
            ending.error = first_error(caught)
    return ending


@pytest.mark.parametrize(
    ("mode", "begin", "stride"),
    [
        ("abort", 2, 6),
        ("retract", 4, 6),
        ("in_place", 6, 6),
        *(pytest.param(mode, 2, 1, marks=pytest.mark.long) for mode in ("abort", "retract", "in_place")),
    ],
)
def test_cancelled_at_any_await_point_everything_live_ends_as_cancelled(mode: str, begin: int, stride: int) -> None:
    # covers: C2, C10
    chosen = settings(mode=mode, steps=3, faults=EVENTFUL)
    whole = interrupted(chosen, None)
    assert whole.error is None
    assert whole.iterations > 200
    for iteration in range(begin, whole.iterations, stride):
        ending = interrupted(chosen, iteration)
        assert isinstance(ending.error, asyncio.CancelledError), (iteration, ending.error)
        assert ending.live() == 0, iteration
        assert not ending.left_over, iteration


def test_a_failing_trainer_is_the_error_that_surfaces_whatever_else_is_under_way() -> None:
    # covers: C2, C10
    chosen = settings(steps=3, faults=EVENTFUL)
    iterations = interrupted(chosen, None).iterations
    failed = 0
    for iteration in range(2, iterations, 6):
        ending = interrupted(chosen, iteration, error=TrainerError("rank 1 died"))
        if ending.error is not None:  # else it came after the last step
            assert str(ending.error) == "rank 1 died", iteration
            failed += 1
        assert ending.live() == 0, iteration
        assert not ending.left_over, iteration
    assert failed > 25
