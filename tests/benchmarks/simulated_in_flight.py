"""1,000 engines with 64 requests each in flight, which no machine here has files and cores for, under virtual time.

The real control loop; the rollout process is a core on which answers wait for each other, and an answer costs what was
measured over real HTTP (``loop_lag``). Weights take no time, so that only this core keeps engines from being busy.
Measured between 1 and 1.5 mean durations of a response after the start.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator

import numpy as np

from miles_async.arguments import EnginesArguments, RolloutArguments, StalenessArguments
from miles_async.simulation.distributions import Fixed, LogNormal
from miles_async.simulation.engine import SimulatedEngine
from miles_async.simulation.plan import CPU_SECONDS_PER_SAMPLE
from miles_async.simulation.run import Simulation, quiet_logs, seeded
from miles_async.simulation.settings import SimulationSettings
from miles_async.simulation.virtual_time import run_in_virtual_time
from tests.benchmarks.in_flight import ENGINES, PER_ENGINE
from tests.benchmarks.report import Row

MEAN_SECONDS = (80.0, 53.0)  # of a response: 800 and 1,200 samples per second
TOKENS, SIMULATED_TOKENS = 8192, 32  # of the median response
SIGMA = 0.5
SPREAD = 0.1  # of the engines' speeds, so that tokens, which are few and long here, don't end at the same moments
LOOKS = 50  # at how many slots are taken
SAMPLES, GROUPS = 8, 8000  # per prompt; prompts per step


def settings(mean: float, engines: int, groups: int) -> SimulationSettings:
    median, chance = mean / math.exp(SIGMA**2 / 2), random.Random(0)
    return SimulationSettings(
        rollout=RolloutArguments(
            num_rollout=10**6,
            rollout_batch_size=groups,
            n_samples_per_prompt=SAMPLES,
            rollout_max_response_len=10**9,
            rollout_concurrency_per_engine=PER_ENGINE,
        ),
        staleness=StalenessArguments(max_weight_staleness=None, max_rollout_lead=3),
        engines=EnginesArguments(sglang_router_policy="power_of_two", request_timeout=10**6),
        num_engines=engines,
        response_seconds=LogNormal(median, SIGMA),
        token_seconds=median / SIMULATED_TOKENS,
        slowness={engine: 1.0 + chance.uniform(-SPREAD, SPREAD) for engine in range(engines)},
        train_seconds=Fixed(1.0),
        rollout_cpu_seconds=CPU_SECONDS_PER_SAMPLE,
        trace=False,
    )


async def measure(mean: float, engines: int, groups: int) -> Row:
    chosen = settings(mean, engines, groups)
    simulation = Simulation(chosen)
    process = simulation.rollout_process
    cpu, seconds = time.process_time(), 0.5 * mean
    running = asyncio.ensure_future(simulation.run())
    await asyncio.sleep(chosen.start_seconds + mean)
    in_flight = simulation.engines.client.in_flight
    busy, answers, taken = process.busy_seconds, len(process.lags), []
    for _ in range(LOOKS):
        taken.append(sum(min(engine.load, PER_ENGINE) for engine in servers(simulation)))
        await asyncio.sleep(seconds / LOOKS)
    busy, lags = process.busy_seconds - busy, process.lags[answers:]
    cpu = time.process_time() - cpu
    running.cancel()
    await asyncio.wait([running])
    return {
        "engines": engines,
        "in_flight": in_flight,
        "response_seconds": mean,
        "ms_per_sample": round(1e3 * chosen.rollout_cpu_seconds, 2),
        "samples_per_second": round(len(lags) / seconds),
        "tokens_per_second": f"{len(lags) / seconds * TOKENS * math.exp(SIGMA**2 / 2):.3g}",
        "slots_taken": round(float(np.mean(taken)) / (engines * PER_ENGINE), 4),
        "of_a_core": round(busy / seconds, 2),
        "lag_ms_p50": round(1e3 * float(np.percentile(lags, 50)), 1),
        "lag_ms_p99": round(1e3 * float(np.percentile(lags, 99)), 1),
        "lag_ms_max": round(1e3 * max(lags), 1),
        "cpu_seconds": round(cpu),
    }


def servers(simulation: Simulation) -> Iterator[SimulatedEngine]:
    return (host for host in simulation.engines.network.hosts.values() if isinstance(host, SimulatedEngine))


def rows(engines: int = ENGINES, groups: int = GROUPS) -> Iterator[Row]:
    """One row per rate."""
    for mean in MEAN_SECONDS:
        with quiet_logs(), seeded(0):
            yield run_in_virtual_time(measure(mean, engines, groups))
