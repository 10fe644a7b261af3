"""State of the progress displays, computed from the metrics of the steps so far. No terminal here."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

AVERAGE_WINDOW = 5  # single steps of a small batch swing by ±0.1; five of them show the trend
TIME_WINDOW = 10
SPARK_WINDOW = 40
SPARKS = "▁▂▃▄▅▆▇█"
MISSING = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """One step as texts, ready to be laid out."""

    step: int
    total: int
    reward: str
    reward_average: str
    loss: str  # shown where there is no reward
    spark: str
    age: str
    lead: str
    in_flight: str
    buffered: str
    filtered: str  # groups since the last step; empty if none was
    trainer_idle: str
    step_seconds: str
    eta: str
    evaluation: str


class ProgressState:
    """Accumulates steps and start-up phases."""

    def __init__(self, total_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = total_steps
        self.phase: str | None = None
        self.view: StepView | None = None
        self._clock = clock
        self._phase_started = self._last_phase_began = clock()
        self._moved = self._spoke = clock()  # the last step or phase; that, or the last heartbeat
        self._rewards: deque[float] = deque(maxlen=SPARK_WINDOW)
        self._step_seconds: deque[float] = deque(maxlen=TIME_WINDOW)
        self._waited = self._elapsed = 0.0
        self._evaluation = MISSING

    @property
    def phase_seconds(self) -> float:
        return self._clock() - self._phase_started

    def begin_phase(self, name: str | None) -> tuple[str, float] | None:
        """End the current phase and return its name and seconds; ``None`` begins no other."""
        ended = (self.phase, self.phase_seconds) if self.phase is not None else None
        if ended is not None:
            self._last_phase_began = self._phase_started
        self.phase, self._phase_started = name, self._clock()
        self._moved = self._spoke = self._clock()
        return ended

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the last step, phase or heartbeat."""
        return self._clock() - self._spoke

    def beat(self, doing: str) -> str:
        """Return the line of a heartbeat: how long there has been no step, and what the run is ``doing``."""
        self._spoke = self._clock()
        still = duration(self._spoke - self._moved)
        line = f"no step for {still}" if self.phase is None else f"still starting {self.phase} after {still}"
        return f"{line}: {doing}" if doing else line

    def add_evaluated(self, ended: int) -> str:
        """Return the line of an evaluation after ``ended`` of its samples."""
        seconds = self._clock() - self._last_phase_began
        self._spoke = self._clock()
        return f"evaluated {ended} samples in {duration(seconds)}"

    def add_evaluation(self, metrics: Mapping[str, float]) -> None:
        self._evaluation = _number(metrics, "eval/reward", "{:.3f}")
        if self.view is not None:  # the last evaluation comes after the last step
            self.view = dataclasses.replace(self.view, evaluation=self._evaluation)

    def add_step(self, step: int, metrics: Mapping[str, float]) -> StepView:
        """Add a step, which counts from 1. Absent metrics show as a dash."""
        if math.isfinite(reward := metrics.get("reward/mean", math.nan)):
            self._rewards.append(reward)
        seconds = metrics.get("time/step_seconds", math.nan)
        if math.isfinite(seconds):
            self._step_seconds.append(seconds)
            self._elapsed += seconds
            self._waited += metrics.get("time/wait_seconds", 0.0)
        self._moved = self._spoke = self._clock()
        filtered = metrics.get("groups/filtered", 0.0)
        recent = list(self._rewards)[-AVERAGE_WINDOW:]
        self.view = StepView(
            step=step,
            total=self.total_steps,
            reward=_number(metrics, "reward/mean", "{:.3f}"),
            reward_average=f"{sum(recent) / len(recent):.3f}" if recent else MISSING,
            loss=_number(metrics, "train/loss", "{:.4f}"),
            spark=sparkline(self._rewards),
            age=f"{_number(metrics, 'age/mean', '{:.2f}')} (max {_number(metrics, 'age/max', '{:.0f}')})",
            lead=_number(metrics, "rollout/lead", "{:.0f}"),
            in_flight=_number(metrics, "rollout/in_flight", "{:.0f}"),
            buffered=_number(metrics, "rollout/buffered", "{:.0f}"),
            filtered=f"{filtered:.0f}" if filtered > 0 else "",
            trainer_idle=f"{self._waited / self._elapsed:.0%}" if self._elapsed else MISSING,
            step_seconds=_number(metrics, "time/step_seconds", "{:.2f} s"),
            eta=self._eta(step),
            evaluation=self._evaluation,
        )
        return self.view

    def _eta(self, done: int) -> str:
        if not self._step_seconds:
            return MISSING
        return duration((self.total_steps - done) * sum(self._step_seconds) / len(self._step_seconds))


def sparkline(values: Sequence[float] | deque[float], low: float = 0.0, high: float = 1.0) -> str:
    """The values as a row of bars. The scale is at least ``low`` to ``high``, so that a reward of 0.2 looks low."""
    if not values:
        return ""
    low, high = min(low, *values), max(high, *values)
    levels = (int((value - low) / ((high - low) or 1.0) * len(SPARKS)) for value in values)
    return "".join(SPARKS[min(level, len(SPARKS) - 1)] for level in levels)


def duration(seconds: float) -> str:
    """``75`` → ``"1:15"``, ``7500`` → ``"2:05:00"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(metrics: Mapping[str, float], name: str, form: str) -> str:
    value = metrics.get(name, math.nan)
    return form.format(value) if math.isfinite(value) else MISSING
