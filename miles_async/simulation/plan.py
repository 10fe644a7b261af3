"""Predict which staleness bound, lead and split of GPUs a run needs, by simulating each candidate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from miles_async.arguments.engines import EnginesArguments
from miles_async.arguments.rollout import RolloutArguments
from miles_async.arguments.staleness import StalenessArguments
from miles_async.arguments.weights import WeightsArguments
from miles_async.errors import ConfigurationError, MilesAsyncError
from miles_async.simulation.distributions import Distribution, Fixed, LogNormal, Trace, median
from miles_async.simulation.result import SimulationResult
from miles_async.simulation.run import simulate
from miles_async.simulation.settings import SimulationSettings

GOOD_ENOUGH = 1.05  # times the best step time; younger data is worth that
MOST_WASTE = 0.02  # of the tokens generated; what is thrown away is long, so trained responses get shorter
CPU_SECONDS_PER_SAMPLE = 1.0e-3  # of the rollout process, not simulated; the least measured by the benchmark loop_lag
TOKENS_PER_RESPONSE = 32  # of the median one: how finely time is divided
DEFAULT_SWEEP = (
    "--on-policy",
    "--max-weight-staleness 1 --max-rollout-lead 2",
    "--max-weight-staleness 2 --max-rollout-lead 2",
    "--max-weight-staleness 2 --max-rollout-lead 3",
    "--max-weight-staleness 4 --max-rollout-lead 2",
    "--max-weight-staleness 4 --max-rollout-lead 3",
    "--max-weight-staleness 6 --max-rollout-lead 3",
    "--max-weight-staleness 8 --max-rollout-lead 3",
    "--max-weight-staleness none --max-rollout-lead 3",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Durations on the user's machines, with the flags as given."""

    response: Distribution  # of its tokens, on a slot
    environment: Distribution  # of one sample, without tokens; it is in flight meanwhile
    reward: Distribution  # of one sample that is generated
    train: Distribution
    publish: Distribution
    copy_seconds: float
    start_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """The flags of one candidate that a simulation needs."""

    rollout: RolloutArguments
    staleness: StalenessArguments
    weights: WeightsArguments
    engines: EnginesArguments
    num_engines: int
    trainer_ranks: int
    slots_per_engine: int | None
    stall_timeout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutProcessUse:
    """CPU time of the rollout process that grows with the number of samples."""

    samples_per_second: float

    @property
    def cores(self) -> float:
        """Share of a core."""
        return self.samples_per_second * CPU_SECONDS_PER_SAMPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One candidate: its prediction, or why it cannot work."""

    label: str  # the flags that are its own
    flags: Flags | None
    result: SimulationResult | None = None
    refusal: str = ""

    @property
    def rollout_process_use(self) -> RolloutProcessUse:
        assert self.flags is not None
        assert self.result is not None
        return RolloutProcessUse(samples_per_second=self.flags.rollout.samples_per_rollout / self.result.step_seconds)


ReadFlags = Callable[[Sequence[str]], Flags]
"""Words of one candidate → its flags. Raises ConfigurationError naming the flag to change."""


def candidates(sweep: Sequence[str]) -> Iterator[str]:
    """Every combination of ``FLAG=VALUE,VALUE``, as words of a command line. Raises ConfigurationError.

    >>> list(candidates(["max-weight-staleness=1,2"]))
    ['--max-weight-staleness 1', '--max-weight-staleness 2']
    """
    if not sweep:
        yield from DEFAULT_SWEEP
        return
    choices = []
    for axis in sweep:
        name, equals, values = axis.partition("=")
        if not equals or not values:
            raise ConfigurationError(f"--sweep {axis}: expected FLAG=VALUE,VALUE, such as max-weight-staleness=1,2")
        choices.append([f"--{name.strip('-')} {value}" for value in values.split(",")])
    yield from (" ".join(chosen) for chosen in itertools.product(*choices))


def predict(
    labels: Iterable[str], read: ReadFlags, timing: Timing, *, steps: int, seed: int, base_trainer_ranks: int
) -> Iterator[Row]:
    """Simulate the candidates one after another. A candidate that cannot work is a row with its refusal."""
    for label in labels:
        try:
            flags = read(label.split())
        except ConfigurationError as error:
            yield Row(label=label, flags=None, refusal=str(error))
            continue
        try:
            result = simulate(_settings(flags, timing, steps, seed, base_trainer_ranks / flags.trainer_ranks))
        except MilesAsyncError as error:
            yield Row(label=label, flags=flags, refusal=str(error))
        else:
            yield Row(label=label, flags=flags, result=result)


def recommend(rows: Iterable[Row]) -> Row | None:
    """The youngest data whose step time is within 5 % of the best: smallest bound, then lead. None: nothing works.

    Of those, as far as there are any, that throw away less than 2 % of what they generate.
    """
    working = [row for row in rows if row.result is not None and row.flags is not None]
    if not working:
        return None
    best = min(_step_seconds(row) for row in working)
    good = [row for row in working if _step_seconds(row) <= GOOD_ENOUGH * best]
    thrifty = [row for row in good if row.result is not None and row.result.wasted_fraction < MOST_WASTE]
    return min(thrifty or good, key=_age_and_lead)


def _step_seconds(row: Row) -> float:
    assert row.result is not None
    return row.result.step_seconds


def _age_and_lead(row: Row) -> tuple[float, int, float]:
    assert row.flags is not None
    staleness = row.flags.staleness
    return (math.inf if staleness.bound is None else staleness.bound, staleness.lead, _step_seconds(row))


def _settings(flags: Flags, timing: Timing, steps: int, seed: int, train_factor: float) -> SimulationSettings:
    return SimulationSettings(
        # The latencies alone determine response lengths; the unit of a token does not matter.
        rollout=replace(flags.rollout, num_rollout=steps, rollout_max_response_len=1 << 40),
        staleness=flags.staleness,
        weights=flags.weights,
        engines=flags.engines,
        num_engines=flags.num_engines,
        slots_per_engine=flags.slots_per_engine,
        response_seconds=timing.response,
        environment_seconds=timing.environment,
        reward_seconds=timing.reward,
        token_seconds=max(1e-6, median(timing.response) / TOKENS_PER_RESPONSE),
        train_seconds=scaled(timing.train, train_factor),
        publish_seconds=timing.publish,
        copy_seconds=timing.copy_seconds,
        start_seconds=timing.start_seconds,
        stall_timeout=flags.stall_timeout,
        seed=seed,
        trace=False,
    )


def scaled(distribution: Distribution, factor: float) -> Distribution:
    """Scale all seconds by ``factor``."""
    match distribution:
        case Fixed(seconds):
            return Fixed(seconds * factor)
        case LogNormal(middle, sigma, longest):
            return LogNormal(middle * factor, sigma, longest * factor)
        case Trace(values):
            return Trace(tuple(value * factor for value in values))
    raise TypeError(f"cannot scale {distribution!r}")
