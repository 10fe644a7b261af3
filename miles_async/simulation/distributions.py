"""Distributions of durations: fixed, lognormal (long tails), or a trace of measured seconds."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from miles_async.errors import ConfigurationError

MOST = 1e12
"""Largest number of seconds, or tokens."""

WIDEST = 10.0
"""Largest σ of a lognormal distribution: a thousandth of its draws are 10¹³ times the median."""


class Distribution(Protocol):
    """Seconds, one draw at a time."""

    def draw(self, chance: random.Random) -> float: ...

    def scaled(self, factor: float) -> Distribution:
        """All seconds, multiplied by ``factor``."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    seconds: float

    def draw(self, chance: random.Random) -> float:
        return self.seconds

    def scaled(self, factor: float) -> Fixed:
        return Fixed(self.seconds * factor)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(N(ln median, σ²)), cut at ``longest`` as ``--rollout-max-response-len`` cuts responses."""

    median: float
    sigma: float
    longest: float = math.inf

    def draw(self, chance: random.Random) -> float:
        return min(self.longest, chance.lognormvariate(math.log(self.median), self.sigma))

    def scaled(self, factor: float) -> LogNormal:
        return LogNormal(self.median * factor, self.sigma, self.longest * factor)


@dataclass(frozen=True, slots=True)
class Trace:
    """Measured values, drawn with replacement."""

    seconds: tuple[float, ...] = field(repr=False)

    def draw(self, chance: random.Random) -> float:
        return chance.choice(self.seconds)

    def scaled(self, factor: float) -> Trace:
        return Trace(tuple(value * factor for value in self.seconds))


def median(distribution: Distribution) -> float:
    """Median of 1,001 draws with a fixed seed."""
    return _sorted_draws(distribution)[500]


def longest(distribution: Distribution) -> float:
    """Longest of 1,001 draws with a fixed seed."""
    return _sorted_draws(distribution)[-1]


def _sorted_draws(distribution: Distribution) -> list[float]:
    chance = random.Random(0)
    return sorted(distribution.draw(chance) for _ in range(1001))


def parse_distribution(text: str, flag: str) -> Distribution:
    """``fixed:SECONDS``, ``lognormal:MEDIAN:SIGMA[:LONGEST]``, ``trace:FILE`` or just SECONDS.

    A trace has one number of seconds per line; lines that are empty or start with # are comments. Raises
    ConfigurationError naming ``flag``.

    >>> parse_distribution("lognormal:20:0.5", "--latency")
    LogNormal(median=20.0, sigma=0.5, longest=inf)
    """
    kind, _, rest = text.partition(":")
    if kind == "trace":
        return _read_trace(Path(rest), f"{flag} {text}")
    words = rest.split(":") if rest else [kind]
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    finite = bool(numbers) and all(0 <= number <= MOST for number in numbers)
    if finite and kind == "lognormal" and len(numbers) in (2, 3) and numbers[0] > 0 and numbers[1] <= WIDEST:
        return LogNormal(*numbers)
    if finite and len(numbers) == 1 and (kind == "fixed" or not rest):
        return Fixed(numbers[0])
    raise ConfigurationError(
        f"{flag} {text}: expected SECONDS, fixed:SECONDS, lognormal:MEDIAN:SIGMA[:LONGEST] or trace:FILE; SIGMA at "
        f"most {WIDEST:g}, the others {MOST:g}"
    )


def _read_trace(path: Path, named: str) -> Trace:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"{named}: {error}") from None
    seconds = []
    for number, line in enumerate(lines, start=1):
        if not (word := line.strip()) or word.startswith("#"):
            continue
        try:
            seconds.append(float(word))
        except ValueError:
            raise ConfigurationError(f"{named}: line {number}: expected seconds, found {word!r}") from None
        if not (math.isfinite(seconds[-1]) and seconds[-1] >= 0):
            raise ConfigurationError(f"{named}: line {number}: expected seconds from 0 up, found {word!r}")
    if not seconds:
        raise ConfigurationError(f"{named}: no seconds in it; expected one number per line")
    return Trace(tuple(seconds))
