"""Metrics of one data set, from sums."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

PASS = 1.0  # smallest reward of a correct sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Facts about one evaluated sample."""

    reward: float
    length: int  # tokens of the response
    truncated: bool
    oldest_version: int  # among the tokens that carry loss
    newest_version: int


@dataclass(slots=True)
class Totals:
    """Sums over a data set whose prompts get ``n_samples`` samples each, in constant memory."""

    n_samples: int
    failed: int = 0
    _sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _counts: Counter[str] = field(default_factory=Counter)
    _extremes: dict[str, int] = field(default_factory=dict)

    def add_prompt(self, samples: Sequence[Outcome | None]) -> None:
        """The samples of one prompt; None for one that failed."""
        outcomes = [sample for sample in samples if sample is not None]
        self.failed += len(samples) - len(outcomes)
        right = sum(outcome.reward >= PASS for outcome in outcomes)
        for k in ks(self.n_samples):
            if k <= len(outcomes):
                self._add(f"pass@{k}", pass_at_k(len(outcomes), right, k))
        for outcome in outcomes:
            self._add("reward/mean", outcome.reward)
            self._add("response_length/mean", outcome.length)
            self._add("truncated_ratio", outcome.truncated)
            self._keep(max, "response_length/max", outcome.length)
            self._keep(min, "weight_version/min", outcome.oldest_version)
            self._keep(max, "weight_version/max", outcome.newest_version)

    def metrics(self) -> dict[str, float]:
        """Metrics by name; those without data are omitted."""
        return {
            **{name: total / self._counts[name] for name, total in self._sums.items()},
            **{name: float(value) for name, value in self._extremes.items()},
            "samples": float(self._counts["reward/mean"]),
            "failed_samples": float(self.failed),
        }

    def _add(self, name: str, value: float) -> None:
        self._sums[name] += value
        self._counts[name] += 1

    def _keep(self, choose: Callable[[int, int], int], name: str, value: int) -> None:
        self._extremes[name] = choose(self._extremes.get(name, value), value)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that one of k samples is right at least, drawn without replacement from n, ``right`` of them right.

    The unbiased estimator 1 − C(n − c, k) / C(n, k) of Chen et al. 2021 (arXiv:2107.03374, section 2.1).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def ks(n: int) -> Iterator[int]:
    """1, 2, 4, ... below n, and n."""
    k = 1
    while k < n:
        yield k
        k *= 2
    yield n
