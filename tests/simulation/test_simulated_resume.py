"""The run is killed at every turn of the event loop and resumed from its newest checkpoint: prompts are trained once.

What is killed is the whole run, so any one of its processes may stand for it: all that survives are the checkpoints.

# covers: C9, R11
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from miles_async.arguments import CheckpointArguments, StalenessArguments
from miles_async.checkpoints.files import find_checkpoint
from miles_async.errors import CheckpointError
from miles_async.simulation.run import Simulation, quiet_logs, seeded
from miles_async.simulation.settings import SimulationSettings
from miles_async.simulation.virtual_time import VirtualTimeLoop, run_in_virtual_time
from tests.simulation.scenario import settings

STEPS, BATCH = 5, 2


@dataclass
class Life:
    """What one process did."""

    trained: list[str]  # prompts, in order
    versions: list[int]  # published
    restored: int  # groups that it took over finished
    iterations: int
    killed: bool


def live(chosen: SimulationSettings, *, kill_at: int | None = None) -> Life:
    """Run; if it is to be killed in an iteration, nothing that it does after that reaches the disk."""
    simulations: list[Simulation] = []
    iterations = 0

    async def main() -> None:
        nonlocal iterations
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert isinstance(loop, VirtualTimeLoop)
        simulations.append(Simulation(chosen))
        if kill_at is not None:
            loop.at_iteration(kill_at, task.cancel)
        try:
            await simulations[0].run()
        finally:
            iterations = loop.iterations

    killed = False
    with quiet_logs(), seeded(0):
        try:
            run_in_virtual_time(main(), limit_seconds=10_000)
        except asyncio.CancelledError:
            killed = True
    return _read(simulations[0], iterations, killed)


def _read(simulation: Simulation, iterations: int, killed: bool) -> Life:
    prompts: dict[str, str] = {}
    life = Life(trained=[], versions=[], restored=0, iterations=iterations, killed=killed)
    for line in simulation.log.lines:
        _, kind, *fields = line.split()
        values = dict(field.split("=") for field in fields)
        if kind == "issued":
            prompts[values["attempt"]] = values["prompt"]
            life.restored += not life.versions  # nothing new is admitted before a version is visible
        elif kind == "ended" and values["outcome"] == "trained":
            life.trained.append(prompts[values["attempt"]])
        elif kind == "published":
            life.versions.append(int(values["version"]))
    return life


def saved_step(directory: Path) -> tuple[int, int]:
    """Step of the newest checkpoint and version to go on from; (0, 0) if there is none."""
    try:
        position = json.loads((find_checkpoint(directory).directory / "position.json").read_bytes())
    except CheckpointError:
        return 0, 0
    return position["step"], position["version"] + (position["unpublished"] > 0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("action", "first_killed", "stride"),
    [
        ("recycle", 2, 16),
        ("wait", 10, 16),
        *(pytest.param(action, 6, 4, marks=pytest.mark.long) for action in ("recycle", "wait")),
    ],
)
def test_killed_at_any_await_point_and_resumed_every_prompt_is_trained_once(
    tmp_path: Path, action: str, first_killed: int, stride: int
) -> None:
    staleness = StalenessArguments(max_weight_staleness=1, stale_group_action=action)
    chosen = replace(settings(steps=STEPS, copy_seconds=0.5), staleness=staleness)
    whole = live(replace(chosen, checkpoint=CheckpointArguments(save=tmp_path / "whole", save_interval=1)))
    expected = sorted(f"p{number}" for number in range(STEPS * BATCH))
    assert sorted(whole.trained) == expected

    resumed_from, restored = [], 0
    for iteration in range(first_killed, whole.iterations, stride):
        directory = tmp_path / str(iteration)
        saving = CheckpointArguments(save=directory, save_interval=1)
        first = live(replace(chosen, checkpoint=saving), kill_at=iteration)
        assert first.killed, iteration
        step, version = saved_step(directory)
        resumed_from.append(step)
        if step > 0:
            saving = replace(saving, load=directory)
        last = live(replace(chosen, checkpoint=saving, seed=1))
        assert sorted(first.trained[: step * BATCH] + last.trained) == expected, iteration
        assert last.versions[0] == version, iteration
        restored += last.restored
        assert saved_step(directory)[0] == STEPS
        shutil.rmtree(directory)
    assert set(resumed_from) == set(range(STEPS + 1))
    assert restored > len(resumed_from) / 2  # groups were taken over with their tokens
