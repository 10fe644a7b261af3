"""Settings of small simulated runs: two engines with two slots each, batches of two groups of two samples."""

from __future__ import annotations

import random
from dataclasses import replace

from miles_async.arguments import EnginesArguments, RolloutArguments, StalenessArguments, WeightsArguments
from miles_async.simulation.distributions import Fixed, LogNormal
from miles_async.simulation.settings import Faults, Silence, SimulationSettings

NO_LIMIT = 10**9

ROLLOUT = RolloutArguments(
    num_rollout=30,
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    rollout_max_response_len=NO_LIMIT,
    rollout_concurrency_per_engine=2,
)

BASE = SimulationSettings(
    rollout=ROLLOUT,
    staleness=StalenessArguments(max_weight_staleness=1),
    response_seconds=LogNormal(1.0, 0.5),
    train_seconds=Fixed(1.0),
    publish_seconds=Fixed(0.1),
    limit_seconds=100_000,
)


def settings(**changes: object) -> SimulationSettings:
    """BASE with changes; ``steps``, ``bound``, ``mode`` and ``batch`` are short for flags."""
    base = BASE
    if "bound" in changes:
        base = replace(base, staleness=StalenessArguments(max_weight_staleness=changes.pop("bound")))
    if "mode" in changes:
        base = replace(base, weights=WeightsArguments(pause_generation_mode=changes.pop("mode")))
    rollout = replace(
        ROLLOUT,
        num_rollout=changes.pop("steps", ROLLOUT.num_rollout),
        rollout_batch_size=changes.pop("batch", ROLLOUT.rollout_batch_size),
    )
    return replace(base, **{"rollout": rollout, **changes})


def silences(chance: random.Random) -> tuple[Silence, ...]:
    """Silences of engines, in one run of four."""
    return tuple(
        Silence(
            at_seconds=chance.uniform(0.0, 60.0),
            seconds=chance.choice([1.0, 10.0, 45.0, 1000.0]),
            engine=chance.randrange(3),
            only_tokens=chance.random() < 0.5,
        )
        for _ in range(chance.choice([0, 0, 0, 2]))
    )


def random_settings(seed: int) -> SimulationSettings:
    """Any combination of the knobs, those that validation refuses included."""
    chance = random.Random(seed)
    return SimulationSettings(
        rollout=RolloutArguments(
            num_rollout=chance.choice([1, 2, 7, 12]),
            rollout_batch_size=chance.choice([1, 2, 5]),
            n_samples_per_prompt=chance.choice([1, 2, 3]),
            rollout_max_response_len=NO_LIMIT,
            rollout_concurrency_per_engine=chance.choice([1, 2, 4]),
            max_prompt_attempts=chance.choice([1, 4]),
        ),
        staleness=StalenessArguments(
            max_weight_staleness=chance.choice([None, 0, 1, 2, 3]),
            max_rollout_lead=chance.choice([None, None, 1, 2, 3]),
            stale_group_action=chance.choice(["recycle", "drop", "wait"]),
            min_group_fraction=chance.choice([1.0, 1.0, 0.5]),
            batch_order=chance.choice(["oldest_first", "completion", "reward_variance"]),
            on_policy=chance.random() < 0.1,
        ),
        weights=WeightsArguments(
            update_weights_interval=chance.choice([1, 1, 2, 3]),
            debug_publication_lag=chance.choice([0, 0, 0, 1, 2]),
            pause_generation_mode=(mode := chance.choice(["abort", "retract", "in_place"])),
            publish_order="all" if mode == "in_place" else chance.choice(["all", "rolling"]),
        ),
        engines=EnginesArguments(engine_max_restarts=1000),
        num_engines=chance.choice([1, 2, 3]),
        response_seconds=LogNormal(1.0, chance.choice([0.1, 0.5, 1.0, 1.5])),
        train_seconds=LogNormal(chance.choice([0.1, 1.0, 5.0]), 0.3),
        publish_seconds=Fixed(chance.choice([0.0, 0.1, 2.0])),
        copy_seconds=chance.choice([0.0, 0.5]),
        faults=Faults(mean_seconds_between_crashes=chance.choice([None, None, 60.0]), silences=silences(chance)),
        limit_seconds=20_000,
        seed=seed,
    )
