"""Predict which staleness bound, lead and split of GPUs a run needs, by simulating each candidate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from miles_async.arguments.staleness import StalenessArguments
from miles_async.errors import ConfigurationError, MilesAsyncError
from miles_async.simulation.result import SimulationResult
from miles_async.simulation.run import simulate
from miles_async.simulation.settings import SimulationSettings

GOOD_ENOUGH = 1.05  # times the best step time; younger data is worth that
MOST_WASTE = 0.02  # of the tokens generated; discarded responses are long, so trained ones get shorter
CPU_SECONDS_PER_SAMPLE = 1.0e-3  # of the rollout process, not simulated; the least measured by the benchmark loop_lag
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
class Prediction:
    """One candidate that works."""

    label: str  # the flags that are its own
    staleness: StalenessArguments
    result: SimulationResult

    @property
    def rollout_cores(self) -> float:
        """CPU that the rollout process needs, in cores: what grows with the number of samples."""
        return self.result.samples_per_step / self.result.step_seconds * CPU_SECONDS_PER_SAMPLE

    @property
    def age_and_lead(self) -> tuple[float, int, float]:
        """By which predictions that are about as fast are sorted."""
        bound = math.inf if self.staleness.bound is None else self.staleness.bound
        return bound, self.staleness.lead, self.result.step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One candidate that cannot work."""

    label: str
    reason: str


Row = Prediction | Refusal
ReadSettings = Callable[[Sequence[str]], SimulationSettings]
"""Words of one candidate → its simulation. Raises ConfigurationError naming the flag to change."""


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


def predict(labels: Iterable[str], read: ReadSettings) -> Iterator[Row]:
    """Simulate the candidates one after another."""
    for label in labels:
        try:
            settings = read(label.split())
            yield Prediction(label=label, staleness=settings.staleness, result=simulate(settings))
        except MilesAsyncError as error:
            yield Refusal(label=label, reason=str(error))


def recommend(rows: Iterable[Row]) -> Prediction | None:
    """The youngest data whose step time is within 5 % of the best: smallest bound, then lead. None: nothing works.

    Of these, it prefers candidates that throw away less than 2 % of the tokens they generate.
    """
    working = [row for row in rows if isinstance(row, Prediction)]
    if not working:
        return None
    best = min(row.result.step_seconds for row in working)
    good = [row for row in working if row.result.step_seconds <= GOOD_ENOUGH * best]
    thrifty = [row for row in good if row.result.wasted_fraction < MOST_WASTE]
    return min(thrifty or good, key=lambda row: row.age_and_lead)
