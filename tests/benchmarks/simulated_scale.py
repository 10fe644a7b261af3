"""The control loop at scale, under virtual time.

``schedule``, ``routers``: 256 samples per step on 64 slots, lognormal latencies, T_train = 0.9 × T_rollout; step time
against max(T_rollout + T_pause, T_train + T_copy), tokens thrown away, Kolmogorov-Smirnov distance between the lengths
of begun and of trained responses. ``cpu``: CPU of the whole simulation per sample (the real dispatcher, client, fleet,
pool and batches, and the simulated engines' own share) by number of engines. ``million``: the same for one long run::

    python -m tests.benchmarks.simulated_scale --prompts 1000000 --engines 1000 --samples-per-prompt 1
"""

from __future__ import annotations

import argparse
import asyncio
import math
import resource
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from miles_async.arguments import EnginesArguments, RolloutArguments, StalenessArguments
from miles_async.simulation.distributions import Fixed, LogNormal
from miles_async.simulation.result import SimulationResult
from miles_async.simulation.run import Simulation, quiet_logs, seeded, simulate
from miles_async.simulation.settings import SimulationSettings
from miles_async.simulation.virtual_time import run_in_virtual_time
from tests.benchmarks.report import Row, report

MEDIAN = 20.0  # seconds of a response
ENGINES, SLOTS, GROUPS, SAMPLES = 8, 8, 32, 8
STEP_GOAL, WASTE_GOAL, LENGTH_GOAL = 1.05, 0.02, 0.05
ROUTERS = ("least_load", "power_of_two", "consistent_hashing")


def settings(
    *,
    sigma: float,
    steps: int,
    staleness: StalenessArguments,
    router: str = "least_load",
    engines: int = ENGINES,
    groups: int = GROUPS,
    samples: int = SAMPLES,
    concurrency: int = SLOTS,
    adaptive: bool = False,
) -> SimulationSettings:
    """T_rollout is groups × samples / slots times the mean latency, and T_train 90 % of that."""
    mean = MEDIAN * math.exp(sigma**2 / 2)
    return SimulationSettings(
        rollout=RolloutArguments(
            num_rollout=steps,
            rollout_batch_size=groups,
            n_samples_per_prompt=samples,
            rollout_max_response_len=10**9,
            rollout_concurrency_per_engine=concurrency,
            adaptive_rollout_concurrency=adaptive,
        ),
        staleness=staleness,
        engines=EnginesArguments(sglang_router_policy=router, request_timeout=10**6),
        num_engines=engines,
        slots_per_engine=SLOTS,
        response_seconds=LogNormal(MEDIAN, sigma),
        token_seconds=MEDIAN / 32,
        train_seconds=Fixed(0.9 * groups * samples * mean / (engines * SLOTS)),
        publish_seconds=Fixed(1.0),
        stall_timeout=10**6,
        trace=False,
    )


def bounded(bound: int | None, lead: int) -> StalenessArguments:
    return StalenessArguments(max_weight_staleness=bound, max_rollout_lead=lead)


def measures(result: SimulationResult) -> Row:
    step = result.step_seconds / result.bound_seconds
    distance = length_distance(result)
    goals = step <= STEP_GOAL and result.wasted_fraction < WASTE_GOAL and distance < LENGTH_GOAL
    return {
        "step_over_bound": round(step, 3),
        "thrown_away_tokens": round(max(0.0, result.wasted_fraction), 4),
        "length_KS": round(distance, 4),
        "meets_goals": goals,
        "mean_age": round(result.mean_age, 2),
        "stale_attempts": round(result.stale_fraction, 4),
        "trainer_idle": round(result.trainer_idle_fraction, 3),
        "slots_idle": round(result.slot_idle_fraction, 3),
    }


def length_distance(result: SimulationResult) -> float:
    """Kolmogorov-Smirnov distance between the lengths of responses begun and trained."""
    counts = (result.drawn_lengths, result.trained_lengths)
    lengths = sorted({*counts[0], *counts[1]})
    cumulated = [[*accumulate(of.get(length, 0) / sum(of.values()) for length in lengths)] for of in counts]
    return max(abs(begun - trained) for begun, trained in zip(*cumulated, strict=True))


def schedule(steps: int = 100) -> Iterator[Row]:
    """Which bound K and lead meet the goals, with requests spread evenly."""
    knobs = [(1, 2), (2, 2), (2, 3), (4, 2), (4, 3), (4, 5), (6, 3), (8, 3), (None, 3)]
    for sigma in (0.5, 1.0):
        result = simulate(settings(sigma=sigma, steps=steps, staleness=StalenessArguments(on_policy=True)))
        yield {"sigma": sigma, "K": 0, "lead": 1, **measures(result)}
        for bound, lead in knobs:
            result = simulate(settings(sigma=sigma, steps=steps, staleness=bounded(bound, lead)))
            yield {"sigma": sigma, "K": bound, "lead": lead, **measures(result)}


def routers(steps: int = 100) -> Iterator[Row]:
    """How requests are spread, and how many are sent to an engine that runs SLOTS at once."""
    for router in ROUTERS:
        for cap, adaptive in ((SLOTS, False), (8 * SLOTS, False), (8 * SLOTS, True)):
            staleness = bounded(4, 3)
            result = simulate(
                settings(sigma=1.0, steps=steps, staleness=staleness, router=router, concurrency=cap, adaptive=adaptive)
            )
            limits = [step.concurrency_limit for step in result.steady]
            limit = round(sum(limits) / len(limits) / ENGINES, 1)
            yield {"router": router, "cap": cap, "adaptive": adaptive, "limit_per_engine": limit, **measures(result)}


def cpu() -> Iterator[Row]:
    """Four waves per step, for at least three steps."""
    for engines in (1, 10, 100, 1000):
        groups = 4 * engines
        steps = max(3, 2000 // groups)
        result = simulate(
            settings(
                sigma=0.5, steps=steps, staleness=bounded(2, 3), router="power_of_two", engines=engines, groups=groups
            )
        )
        yield {
            "engines": engines,
            "samples_per_step": groups * SAMPLES,
            "samples": result.samples,
            "virtual_seconds": round(result.seconds),
            "cpu_us_per_sample": round(1e6 * result.cpu_seconds / result.samples),
        }


def million(*, prompts: int, engines: int, samples: int) -> Iterator[Row]:
    """One long run, with its progress on stderr."""
    waves = 4
    groups = min(prompts, max(1, waves * SLOTS * engines // samples))
    steps = -(-prompts // groups)
    chosen = settings(
        sigma=0.5, steps=steps, staleness=bounded(2, 3), router="power_of_two", engines=engines,
        groups=groups, samples=samples,
    )  # fmt: skip
    started, cpu_started = time.perf_counter(), time.process_time()
    with quiet_logs(), seeded(0):
        result = run_in_virtual_time(_watched(chosen, cpu_started))
    yield {
        "engines": engines,
        "prompts": result.balance["trained"],
        "samples": result.samples,
        "steps": steps,
        "issued": result.balance["issued"],
        "virtual_hours": round(result.seconds / 3600, 2),
        "cpu_seconds": round(result.cpu_seconds),
        "wall_seconds": round(time.perf_counter() - started),
        "cpu_us_per_sample": round(1e6 * result.cpu_seconds / result.samples),
        "peak_memory_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


async def _watched(chosen: SimulationSettings, cpu_started: float) -> SimulationResult:
    simulation = Simulation(chosen)

    async def watch() -> None:
        said = 0
        while True:
            await asyncio.sleep(MEDIAN)
            if (done := len(simulation.recording.steps)) > said:
                said = done
                seconds = time.process_time() - cpu_started
                print(
                    f"step {done} of {chosen.rollout.num_rollout}, {seconds:.0f} s of CPU", file=sys.stderr, flush=True
                )

    async with asyncio.TaskGroup() as scope:
        watcher = scope.create_task(watch())
        await simulation.run()
        watcher.cancel()
    return simulation.result(cpu_seconds=time.process_time() - cpu_started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--samples-per-prompt", type=int, default=1)
    own: Any = parser.parse_args()
    report("million", million(prompts=own.prompts, engines=own.engines, samples=own.samples_per_prompt))


if __name__ == "__main__":
    main()
