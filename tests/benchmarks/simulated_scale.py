"""The control loop at scale, under virtual time. Run by hand; minutes of CPU.

    python -m tests.benchmarks.simulated_scale [--steps 100] [--engines 1000] [--output FILE]

Prints a JSON object per line. ``schedule``: 256 samples on 64 slots, lognormal latencies, T_train = 0.9 × T_rollout;
step time against max(T_rollout, T_train) + T_pause, thrown-away tokens, KS distance between generated and trained
lengths. ``cpu``: CPU microseconds of the whole simulation per sample (the real dispatcher, client, fleet and pool, and
the simulated engines' own share) by number of engines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arguments import EnginesArguments, RolloutArguments, StalenessArguments
from miles_async.simulation.distributions import Fixed, LogNormal
from miles_async.simulation.result import SimulationResult
from miles_async.simulation.run import simulate
from miles_async.simulation.settings import SimulationSettings

MEDIAN = 20.0  # seconds of a response
ENGINES, SLOTS, GROUPS, SAMPLES = 8, 8, 32, 8
BALANCED, HASHED = "power_of_two", "consistent_hashing"
MODES = {
    "on-policy": StalenessArguments(on_policy=True),
    "K=1": StalenessArguments(max_weight_staleness=1),
    "K=2": StalenessArguments(max_weight_staleness=2),
    "K=4": StalenessArguments(max_weight_staleness=4),
    "unbounded, lead 3": StalenessArguments(),
}


def settings(**changes: Any) -> SimulationSettings:
    """T_rollout is GROUPS × SAMPLES / (ENGINES × SLOTS) times the mean latency, and 90 % of that T_train."""
    sigma, steps = changes.pop("sigma"), changes.pop("steps")
    engines, groups, policy = changes.pop("engines", ENGINES), changes.pop("groups", GROUPS), changes.pop("policy")
    mean = MEDIAN * math.exp(sigma**2 / 2)
    return SimulationSettings(
        rollout=RolloutArguments(
            num_rollout=steps,
            rollout_batch_size=groups,
            n_samples_per_prompt=SAMPLES,
            rollout_max_response_len=10**9,
            rollout_concurrency_per_engine=SLOTS,
        ),
        engines=EnginesArguments(sglang_router_policy=policy, request_timeout=10**6),
        num_engines=engines,
        response_seconds=LogNormal(MEDIAN, sigma),
        token_seconds=MEDIAN / 32,
        train_seconds=Fixed(0.9 * groups * SAMPLES * mean / (engines * SLOTS)),
        publish_seconds=Fixed(1.0),
        stall_timeout=10**6,
        trace=False,
        **changes,
    )


def schedule(steps: int) -> Iterator[dict[str, Any]]:
    for sigma in (0.5, 1.0):
        for policy in (BALANCED, HASHED):
            for name, staleness in MODES.items():
                result = simulate(settings(sigma=sigma, steps=steps, policy=policy, staleness=staleness))
                yield {"benchmark": "schedule", "sigma": sigma, "router": policy, "mode": name, **measures(result)}


def measures(result: SimulationResult) -> dict[str, float]:
    return {
        "step_over_bound": round(result.step_seconds / result.bound_seconds, 3),
        "trainer_idle": round(result.trainer_idle_fraction, 3),
        "slots_idle": round(result.slot_idle_fraction, 3),
        "mean_age": round(result.mean_age, 2),
        "stale_attempts": round(result.stale_fraction, 4),
        "thrown_away_tokens": round(result.wasted_fraction, 4),
        "length_ks": round(result.length_distance, 4),
        "cpu_us_per_sample": round(1e6 * result.cpu_seconds / result.samples),
    }


def cpu(most_engines: int) -> Iterator[dict[str, Any]]:
    staleness = StalenessArguments(max_weight_staleness=2)
    for engines in (1, 10, 100, 1000):
        if engines > most_engines:
            return
        groups = 4 * engines  # four waves per step
        steps = max(6, 2000 // groups)
        result = simulate(
            settings(sigma=0.5, steps=steps, policy=HASHED, staleness=staleness, engines=engines, groups=groups)
        )
        yield {
            "benchmark": "cpu",
            "engines": engines,
            "samples_per_step": groups * SAMPLES,
            "samples": result.samples,
            "virtual_seconds": round(result.seconds),
            "cpu_us_per_sample": round(1e6 * result.cpu_seconds / result.samples),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--output", type=Path)
    own = parser.parse_args()
    lines = []
    for row in itertools.chain(schedule(own.steps), cpu(own.engines)):
        lines.append(json.dumps(row))
        print(lines[-1], file=sys.stdout, flush=True)
    if own.output is not None:
        own.output.write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main()
