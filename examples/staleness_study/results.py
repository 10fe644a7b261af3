"""Results of finished cells: the records, their file, and the numbers in the report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median

import msgspec

from examples.staleness_study.cells import Cell

SPIKE = 2.0  # times the median of the run
REWARD_STEPS = 10  # over which the reward at the end is averaged
LAST_STEPS = 30  # over which effective sample sizes are averaged; the data has its full age by then


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """A finished cell."""

    age: int
    correction: str
    seed: int
    fingerprint: str  # of the flags that it ran with
    greedy: float  # share of right answers to the test prompts, by the final weights, taking the likeliest tokens
    sampled: float  # the same at temperature 1
    rewards: tuple[float, ...]  # per step: mean over samples
    grad_norms: tuple[float | None, ...]  # per step, before clipping; None where nothing was learned from
    ess: tuple[float, ...]  # per step: effective share of sequences

    @property
    def cell(self) -> Cell:
        return Cell(age=self.age, correction=self.correction, seed=self.seed)

    @property
    def spikes(self) -> float:
        """Share of steps whose gradient norm is more than :data:`SPIKE` times the run's median."""
        norms = [norm for norm in self.grad_norms if norm is not None]
        middle = median(norms) if norms else 0.0
        return mean(norm > SPIKE * middle for norm in norms) if norms else 0.0

    @property
    def last_reward(self) -> float:
        """Mean reward over the last :data:`REWARD_STEPS` steps."""
        return mean(self.rewards[-REWARD_STEPS:])

    @property
    def last_ess(self) -> float:
        """Mean effective share of sequences over the last :data:`LAST_STEPS` steps."""
        return mean(self.ess[-LAST_STEPS:])


class Results:
    """The results of the study in a file: one JSON array, a line per cell in the order of their names."""

    def __init__(self, path: Path) -> None:
        """Raises msgspec.ValidationError if the file holds something else."""
        self._path = path
        found = msgspec.json.decode(path.read_bytes(), type=list[CellResult]) if path.exists() else []
        self._by_cell = {result.cell: result for result in found}

    def current(self, cells: Iterable[Cell]) -> list[CellResult]:
        """Results of those of ``cells`` that ran with the flags that they have now."""
        found = (self._by_cell.get(cell) for cell in cells)
        return [result for result in found if result is not None and result.fingerprint == result.cell.fingerprint]

    def add(self, result: CellResult) -> None:
        """Put ``result`` into the file, in place of an older one of its cell."""
        self._by_cell[result.cell] = result
        ordered = sorted(self._by_cell.values(), key=lambda one: (one.age, one.correction, one.seed))
        lines = ",\n".join(msgspec.json.encode(one).decode() for one in ordered)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")  # renamed when whole
        partial.write_text(f"[\n{lines}\n]\n")
        partial.replace(self._path)
