"""Result of a simulated run, in the terms of summary.json and relative to the best possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from miles_async.simulation.recording import Step
from miles_async.types import Publication

WARM_UP = 0.1  # share of the steps that measures of the steady state leave out
COOL_DOWN = 0.1  # towards the end nothing new is admitted
BOUND = "max(T_rollout + T_pause, T_train + T_copy)"  # of a step, in seconds: what no schedule can beat


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Times in virtual seconds, unless it says CPU."""

    steps: tuple[Step, ...]
    publications: tuple[tuple[float, Publication], ...]
    balance: Mapping[str, int]
    trained_lengths: Mapping[int, int]  # tokens → trained responses
    max_lead: int  # groups that held slots at once, at most
    seconds: float
    slot_seconds: float  # slots × seconds of generating
    slots: int  # of all engines
    generated_tokens: int  # by engines, trained or not
    rollout_cpu_seconds: float  # of the simulated rollout process
    answer_lags: Sequence[float]  # seconds that each answer waited for the simulated rollout process
    drawn_lengths: Mapping[int, int]  # tokens → responses that engines began, aborted or not
    seconds_per_sample: float  # mean of the draws: a response on a slot, undisturbed
    samples_per_step: int
    cpu_seconds: float  # of the whole process, simulated engines included
    trace: bytes

    @property
    def samples(self) -> int:
        return len(self.steps) * self.samples_per_step

    @cached_property
    def steady(self) -> tuple[Step, ...]:
        """Steps of the steady state; the first marks where measuring starts."""
        first, last = int(len(self.steps) * WARM_UP), len(self.steps) - int(len(self.steps) * COOL_DOWN)
        return self.steps[first:last]

    @property
    def step_seconds(self) -> float:
        """Mean step time over the steady state; over all steps if they are too few to have one."""
        steady = self.steady
        elapsed = steady[-1].ended - steady[0].ended
        return elapsed / (len(steady) - 1) if elapsed else self.steps[-1].ended / len(self.steps)

    @property
    def pause_seconds(self) -> float:
        """Mean pause per step that publications cost the rollout side."""
        return sum(record.pause_seconds for record in self._steady_publications) / max(1, len(self.steady) - 1)

    @property
    def copy_seconds(self) -> float:
        """Mean time per step that the trainer spends on export and copy of weights."""
        return sum(record.copy_seconds for record in self._steady_publications) / max(1, len(self.steady) - 1)

    @property
    def _steady_publications(self) -> list[Publication]:
        start, end = self.steady[0].ended, self.steady[-1].ended
        return [record for when, record in self.publications if start < when <= end]

    @property
    def train_seconds(self) -> float:
        """Mean training time over the steady state."""
        return sum(step.train_seconds for step in self.steady[1:]) / max(1, len(self.steady) - 1)

    @property
    def rollout_seconds(self) -> float:
        """T_rollout: one batch on all slots, if they were never idle and nothing was thrown away. Environments and
        rewards hold no slot.
        """
        return self.samples_per_step * self.seconds_per_sample / self.slots

    @property
    def bound_seconds(self) -> float:
        """Lower bound of the step time (``BOUND``): engines pause, and the trainer copies, for each publication."""
        return max(self.rollout_seconds + self.pause_seconds, self.train_seconds + self.copy_seconds)

    @property
    def trainer_idle_fraction(self) -> float:
        """Share of the steady state in which the trainer waits for its batch, or for the last delivery."""
        waited = sum(step.wait_seconds for step in self.steady[1:])
        return waited / max(1e-12, self.steady[-1].ended - self.steady[0].ended)

    @property
    def slot_idle_fraction(self) -> float:
        """Share of slots × seconds of the run that generated nothing."""
        return 1 - self.slot_seconds / max(1e-12, self.slots * (self.seconds - self.publications[0][0]))

    @property
    def ages(self) -> Mapping[int, int]:
        """Age → samples trained."""
        total: Counter[int] = Counter()
        for step in self.steps:
            total.update(step.ages)
        return dict(sorted(total.items()))

    @property
    def mean_age(self) -> float:
        """Mean age over all trained samples."""
        return sum(age * count for age, count in self.ages.items()) / max(1, sum(self.ages.values()))

    @property
    def stale_fraction(self) -> float:
        """Share of issued attempts that were recycled or dropped."""
        return (self.balance["recycled"] + self.balance["dropped"]) / max(1, self.balance["issued"])

    @property
    def wasted_fraction(self) -> float:
        """Share of generated tokens that were never trained."""
        trained = sum(length * count for length, count in self.trained_lengths.items())
        return 1 - trained / max(1, self.generated_tokens)
