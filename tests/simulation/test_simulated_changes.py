"""Bound, lead and concurrency change while the real loop runs, between cuts, at random.

# covers: C1, C2, C3, C4, C11
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import EnginesArguments, StalenessArguments
from miles_async.ledger.reader import open_ledger
from miles_async.runtime.garbage import rare_collections
from miles_async.simulation.distributions import LogNormal
from miles_async.simulation.result import SimulationResult
from miles_async.simulation.run import Simulation, quiet_logs, seeded
from miles_async.simulation.settings import Faults, SimulationSettings
from miles_async.simulation.virtual_time import run_in_virtual_time
from miles_async.types import Changes, SettingValue
from tests.simulation.scenario import settings
from tests.simulation.test_simulated_replay import replay_of

STEPS = 60


class Scripted:
    """LiveSettings that takes its requests from a table."""

    def __init__(self, script: Mapping[int, Mapping[str, SettingValue]]) -> None:
        self.script = script

    def begin(self, step: int) -> None: ...

    def take(self, step: int, *, last: bool) -> Changes | None:
        return Changes(after=step, before={}, values=self.script[step]) if step in self.script else None


def simulate_with(
    chosen: SimulationSettings, script: Mapping[int, Mapping[str, SettingValue]]
) -> tuple[SimulationResult, list[Mapping[str, float]]]:
    """The result, and the metrics of the steps."""

    async def main() -> tuple[SimulationResult, list[Mapping[str, float]]]:
        simulation = Simulation(chosen, live=Scripted(script))
        metrics: list[Mapping[str, float]] = []
        plain = simulation.recording.step

        def step(number: int, of_step: Mapping[str, float], ages: Mapping[int, int]) -> None:
            metrics.append(of_step)
            plain(number, of_step, ages)

        simulation.recording.step = step  # type: ignore[method-assign]
        await simulation.run()
        return simulation.result(), metrics

    with quiet_logs(), seeded(chosen.seed), rare_collections():
        return run_in_virtual_time(main(), limit_seconds=chosen.limit_seconds)


def random_script(chance: random.Random, *, bound: int, lower: bool) -> dict[int, dict[str, SettingValue]]:
    script: dict[int, dict[str, SettingValue]] = {}
    for step in range(1, STEPS - 1):
        if chance.random() < 0.2:
            bound = chance.choice([0, 1, 2, 3] if lower else range(bound, 6))
            script[step] = {
                "max_weight_staleness": bound,
                "max_rollout_lead": chance.randint(1, bound + 1),
                "rollout_concurrency_per_engine": chance.choice([1, 2, 4]),
            }
    return script


def bounds(script: Mapping[int, Mapping[str, SettingValue]], first: int) -> list[int]:
    """The bound of each step's batch."""
    found = [first]
    for step in range(1, STEPS):
        value = script.get(step, {}).get("max_weight_staleness", found[-1])
        assert isinstance(value, int)
        found.append(value)
    return found


@pytest.mark.parametrize("action", ["recycle", "drop", "wait"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))])
def test_every_step_obeys_the_bound_that_its_batch_was_cut_under(action: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"{seed} {action}")
    script = random_script(chance, bound=1, lower=action != "wait")
    chosen = settings(
        steps=STEPS,
        staleness=StalenessArguments(max_weight_staleness=1, stale_group_action=action),
        response_seconds=LogNormal(1.0, 1.2),
        faults=Faults(mean_seconds_between_crashes=200.0),
        engines=EnginesArguments(engine_max_restarts=10_000),
        schedule=tmp_path / "schedule",
        ledger=tmp_path / "ledger",
        seed=seed,
    )
    result, metrics = simulate_with(chosen, script)
    expected = bounds(script, first=1)
    assert [max(step.ages) <= bound for step, bound in zip(result.steps, expected, strict=True)] == [True] * STEPS
    assert [of_step["age/bound"] for of_step in metrics] == expected
    assert result.balance["trained"] == 2 * STEPS
    assert action != "wait" or result.balance["recycled"] == result.balance["dropped"] == 0
    with open_ledger(tmp_path / "ledger") as reader:
        noted = [(change.step, change.name, change.value) for change in reader.changes()]
    assert noted == [
        (step, name.replace("_", "-"), value) for step, values in script.items() for name, value in values.items()
    ]
    replay = replay_of(chosen)
    assert [batch.step for batch in replay] == [step.step for step in result.steps]
    assert replay.complete


def test_a_lower_bound_recycles_what_is_too_old_and_a_higher_one_lets_older_groups_in() -> None:
    chosen = settings(steps=STEPS, bound=3, response_seconds=LogNormal(1.0, 0.2))
    low = {10: {"max_weight_staleness": 0, "max_rollout_lead": 1}}
    high = {30: {"max_weight_staleness": 3, "max_rollout_lead": 4}}
    result, metrics = simulate_with(chosen, low | high)
    ages = [max(step.ages) for step in result.steps]
    assert max(ages[:10]) > 0
    assert max(ages[10:30]) == 0
    assert max(ages[30:]) > 0
    assert [of_step["rollout/lead_limit"] for of_step in metrics[11:30]] == [2] * 19
    assert max(of_step["rollout/lead"] for of_step in metrics[12:30]) <= 2


def test_a_stop_ends_the_run_after_its_step_with_everything_accounted_for() -> None:
    result, _ = simulate_with(settings(steps=STEPS), {7: {"stop": "after-step"}})
    assert [step.step for step in result.steps] == list(range(1, 8))
    balance = dict(result.balance)
    assert balance.pop("issued") == sum(balance.values())
    assert balance["trained"] == 14


def test_fewer_samples_in_flight_per_engine() -> None:
    chosen = settings(steps=STEPS, bound=3)
    chosen = replace(chosen, rollout=replace(chosen.rollout, rollout_concurrency_per_engine=4))
    _, metrics = simulate_with(chosen, {20: {"rollout_concurrency_per_engine": 1}})
    assert metrics[10]["rollout/concurrency_limit"] == 8  # two engines
    assert metrics[30]["rollout/concurrency_limit"] == 2


async def _paused(seconds: float) -> tuple[int, int, int]:
    """Groups admitted before, during and after a pause of generation."""
    simulation = Simulation(settings(steps=STEPS))
    run = asyncio.create_task(simulation.run())
    await asyncio.sleep(20.0)
    await simulation.manager.change(Changes(after=0, before={}, values={"generation": "paused"}))
    await asyncio.sleep(50.0)  # for what was in flight, and for batches that it fills
    before = simulation.pool.balance().issued
    await asyncio.sleep(seconds)
    during = simulation.pool.balance()
    assert during.in_flight == 0
    await simulation.manager.change(Changes(after=0, before={}, values={"generation": "running"}))
    await run
    return before, during.issued, simulation.pool.balance().issued


def test_a_pause_of_generation_is_no_stall_however_long_it_takes() -> None:
    # covers: C10
    seconds = 10 * settings().stall_timeout
    with quiet_logs(), seeded(0):
        before, during, after = run_in_virtual_time(_paused(seconds), limit_seconds=20 * seconds)
    assert 0 < before == during < after
    assert after >= 2 * STEPS
