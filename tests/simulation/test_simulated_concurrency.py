"""Concurrency that follows engines and their load, in whole simulated runs.

# covers: C4
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest

from miles_async.arguments import EnginesArguments, RolloutArguments
from miles_async.simulation.distributions import Fixed, LogNormal
from miles_async.simulation.result import SimulationResult
from miles_async.simulation.run import simulate
from miles_async.simulation.settings import Crash, Faults, SimulationSettings
from tests.simulation.scenario import BASE, NO_LIMIT

ENGINES, SLOTS = 2, 8
ROLLOUT = RolloutArguments(
    num_rollout=40,
    rollout_batch_size=8,
    n_samples_per_prompt=4,
    rollout_max_response_len=NO_LIMIT,
    rollout_concurrency_per_engine=SLOTS,
)


def scenario(*, adaptive: bool, cap: int = 8 * SLOTS, kv_target: float = 0.9, **changes: object) -> SimulationSettings:
    """Generation is what takes time, and its requests go to the less loaded engine."""
    rollout = replace(
        ROLLOUT,
        rollout_concurrency_per_engine=cap,
        adaptive_rollout_concurrency=adaptive,
        rollout_kv_use_target=kv_target,
    )
    balanced = EnginesArguments(sglang_router_policy="power_of_two", engine_max_restarts=0)
    settings = replace(
        BASE,
        rollout=rollout,
        engines=balanced,
        num_engines=ENGINES,
        slots_per_engine=SLOTS,
        response_seconds=LogNormal(20.0, 0.5),
        token_seconds=2.0,
        train_seconds=Fixed(1.0),
        trace=False,
    )
    return replace(settings, **changes)


def late_limits(result: SimulationResult) -> list[int]:
    """Of the second half of the run."""
    return [step.concurrency_limit for step in result.steps[len(result.steps) // 2 :]]


@cache
def fixed(cap: int) -> SimulationResult:
    return simulate(scenario(adaptive=False, cap=cap))


@pytest.mark.parametrize("kv_target", [0.9, 1.0])  # at 1.0 only queues tell
def test_a_far_too_high_cap_ends_near_the_capacity_of_engines(kv_target: float) -> None:
    right, flooded = fixed(SLOTS), fixed(8 * SLOTS)
    found = simulate(scenario(adaptive=True, kv_target=kv_target))
    assert {step.concurrency_limit for step in flooded.steps} == {8 * ENGINES * SLOTS}
    assert found.steps[0].concurrency_limit > 4 * ENGINES * SLOTS
    assert 0.75 < fmean(late_limits(found)) / (ENGINES * SLOTS) < 1.25
    assert found.step_seconds < 1.15 * right.step_seconds
    assert found.mean_age < flooded.mean_age  # nothing waits in engines' queues while versions pass


def test_a_cap_that_engines_hold_is_reached_and_kept() -> None:
    result = simulate(scenario(adaptive=True, cap=SLOTS // 2))
    assert set(late_limits(result)) == {ENGINES * SLOTS // 2}


def test_a_slow_engine_does_not_starve_the_others() -> None:
    slow = {"slowness": {0: 4.0}, "num_engines": 4}
    right = simulate(scenario(adaptive=False, cap=SLOTS, **slow))
    found = simulate(scenario(adaptive=True, **slow))
    assert min(late_limits(found)) > 0.7 * 4 * SLOTS
    assert found.step_seconds < 1.15 * right.step_seconds


def test_an_engine_that_is_lost_takes_its_share_of_the_limit_along() -> None:
    result = simulate(scenario(adaptive=False, faults=Faults(crashes=(Crash(at_seconds=500.0, engine=1),))))
    before = {step.concurrency_limit for step in result.steps if step.ended < 400}
    after = {step.concurrency_limit for step in result.steps if step.ended > 1000}
    assert (before, after) == ({8 * ENGINES * SLOTS}, {8 * SLOTS})
    assert len(result.steps) == ROLLOUT.num_rollout


def test_an_engine_that_comes_back_brings_it_again() -> None:
    restarted = EnginesArguments(sglang_router_policy="power_of_two")
    result = simulate(
        scenario(
            adaptive=True,
            cap=2 * SLOTS,
            kv_target=1.0,
            engines=restarted,
            start_seconds=500.0,
            faults=Faults(crashes=(Crash(at_seconds=1200.0, engine=1),)),
        )
    )
    whole, alone = (
        fmean(step.concurrency_limit for step in result.steps if start < step.ended < start + 300)
        for start in (900, 1400)
    )
    assert alone == pytest.approx(SLOTS, rel=0.25)
    assert whole == pytest.approx(ENGINES * SLOTS, rel=0.25)
    assert late_limits(result)[-5:] == pytest.approx([ENGINES * SLOTS] * 5, rel=0.25)
