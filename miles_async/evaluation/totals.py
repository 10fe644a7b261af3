"""Metrics of one data set, from sums."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from miles_async.staleness.versions import loss_versions
from miles_async.types import Sample

PASS = 1.0  # smallest reward of a correct sample


@dataclass(slots=True)
class Totals:
    """Sums over a data set whose prompts get ``n_samples`` samples each, in constant memory."""

    n_samples: int
    failed: int = 0
    _sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _counts: Counter[str] = field(default_factory=Counter)
    _extremes: dict[str, int] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Add a rewarded sample. Raises VersionUnknownError."""
        versions = loss_versions(sample)
        assert sample.reward is not None, "it is rewarded"
        self._add("reward/mean", sample.reward)
        self._add("response_length/mean", sample.longest_response)
        self._add("truncated_ratio", sample.finish_reason != "stop")
        self._keep(max, "response_length/max", sample.longest_response)
        self._keep(min, "weight_version/min", int(versions.min()))
        self._keep(max, "weight_version/max", int(versions.max()))

    def end_prompt(self, rewards: Sequence[float]) -> None:
        """Note that a prompt has ended, with the rewards of the samples that did not fail."""
        self.failed += self.n_samples - len(rewards)
        right = sum(reward >= PASS for reward in rewards)
        for k in ks(self.n_samples):
            if k <= len(rewards):
                self._add(f"pass@{k}", pass_at_k(len(rewards), right, k))

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
