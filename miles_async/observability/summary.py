"""The run in one record: ``summary.json``.

Everything is computed from actual events: ages from the per-token versions of trained samples, groups from the ledger.
Numbers that were never measured are null, never 0.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from miles_async.observability.progress_state import AVERAGE_WINDOW
from miles_async.runtime.files.whole_file import write_whole

GROUPS = (
    *("issued", "trained", "recycled", "dropped", "filtered", "failed", "quarantined", "cancelled"),
    *("in_flight", "buffered"),
)

Ending = Literal["finished", "interrupted", "failed", "lost", "stalled"]
"""How a run ended. lost: a process was lost to a machine's fault, so another try may succeed. stalled: a wait
passed its deadline.
"""


class Publish(TypedDict):
    """Publications of the run; seconds are None if there were none."""

    count: int
    pause_seconds_mean: float | None
    prepare_seconds_mean: float | None


class LogprobDifference(TypedDict):
    """Log-probs of engine and trainer, same tokens and weights."""

    mean: float | None
    max: float | None


class Summary(TypedDict):
    """Content of summary.json. None: never measured."""

    steps: int
    wall_seconds: float
    reward_first: float | None
    reward_last: float | None  # mean of the last AVERAGE_WINDOW steps
    eval_reward_first: float | None
    eval_reward_last: float | None
    age_max: int | None
    age_histogram: dict[str, int]  # age → samples
    groups: dict[str, int]  # issued, and how many ended or stand where
    balanced: bool  # issued is the sum of the others
    trainer_idle_fraction: float | None
    rollout_idle_fraction: float | None
    publish: Publish
    logprob_diff: LogprobDifference
    weight_version: int | None
    stage_seconds: dict[str, float]
    ending: NotRequired[Ending]  # absent during the run
    error: NotRequired[str]  # that ended it; absent if it finished or was interrupted
    restarts: NotRequired[list[dict[str, str | float | None]]]  # --max-run-restarts: earlier lives, as RunRestart


class RunSummary:
    """Accumulates a run, step by step, and finishes it into a dictionary. A resumed run starts from zero."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._steps = 0
        self._ages: Counter[int] = Counter()
        self._stages: defaultdict[str, float] = defaultdict(float)
        self._pauses: list[float] = []
        self._preparations: list[float] = []
        self._eval_rewards: list[float] = []
        self._difference_sum = self._difference_tokens = 0.0
        self._difference_max = -math.inf

    def record_step(self, metrics: Mapping[str, float], ages: Mapping[int, int]) -> None:
        """Record one trained step. ``ages``: age in weight versions → number of samples trained at that age."""
        self._steps += 1
        if math.isfinite(reward := metrics.get("reward/mean", math.nan)):
            self._rewards.append(reward)
        self._ages.update(ages)
        for name, value in metrics.items():
            if name.startswith("time/") and name.endswith("_seconds") and math.isfinite(value):
                self._stages[name.removeprefix("time/").removesuffix("_seconds")] += value
        self._add_difference(metrics)

    def record_stage(self, name: str, seconds: float) -> None:
        """Record a stage outside of the steps, such as the start of the engines."""
        self._stages[name] += seconds

    def record_publication(self, pause_seconds: float, prepare_seconds: float) -> None:
        """Record a visible version. ``pause``: seconds that rollouts stood still; ``prepare``: all before."""
        self._pauses.append(pause_seconds)
        self._preparations.append(prepare_seconds)

    def record_eval(self, reward: float) -> None:
        if math.isfinite(reward):
            self._eval_rewards.append(reward)

    def finish(
        self,
        balance: Mapping[str, int],
        *,
        rollout_idle_seconds: float = 0.0,
        rollout_seconds: float = 0.0,
        wall_seconds: float,
        weight_version: int,
    ) -> Summary:
        """Return the summary.

        ``balance``: groups issued, and how many ended or stand where. ``wall_seconds``: the whole run.
        Start-up is not counted as idle: the trainer's waits are a fraction of all steps, ``rollout_idle_seconds`` of
        ``rollout_seconds``, from the first publication to the end of the last step, evaluations between steps included;
        0 if not measured.
        """
        steps = self._stages.get("step") or wall_seconds
        groups = {**dict.fromkeys(GROUPS, 0), **balance}
        return {
            "steps": self._steps,
            "wall_seconds": _rounded(wall_seconds),
            "reward_first": _rounded(self._rewards[0]) if self._rewards else None,
            "reward_last": _mean(self._rewards[-AVERAGE_WINDOW:]),
            "eval_reward_first": _rounded(self._eval_rewards[0]) if self._eval_rewards else None,
            "eval_reward_last": _rounded(self._eval_rewards[-1]) if self._eval_rewards else None,
            "age_max": max((age for age, count in self._ages.items() if count), default=None),
            "age_histogram": {str(age): count for age, count in sorted(self._ages.items()) if count},
            "groups": groups,
            "balanced": groups["issued"] == sum(count for name, count in groups.items() if name != "issued"),
            "trainer_idle_fraction": _fraction(self._stages.get("wait", 0.0), steps),
            "rollout_idle_fraction": _fraction(rollout_idle_seconds, rollout_seconds),
            "publish": {
                "count": len(self._pauses),
                "pause_seconds_mean": _mean(self._pauses[1:]),  # rollouts have not begun at the first one
                "prepare_seconds_mean": _mean(self._preparations),
            },
            "logprob_diff": {
                "mean": self._difference_sum / self._difference_tokens if self._difference_tokens else None,
                "max": self._difference_max if math.isfinite(self._difference_max) else None,
            },
            "weight_version": weight_version,
            "stage_seconds": {name: _rounded(seconds) for name, seconds in self._stages.items()},
        }

    def _add_difference(self, metrics: Mapping[str, float]) -> None:
        """Add the difference of engine and trainer on equal weights; steps without such tokens don't count."""
        tokens = metrics.get("train/logprob_diff_tokens", 1.0)
        mean = metrics.get("train/logprob_diff_mean", math.nan)
        largest = metrics.get("train/logprob_diff_max", math.nan)
        if not tokens:
            return
        if math.isfinite(mean):
            self._difference_sum += mean * tokens
            self._difference_tokens += tokens
        if math.isfinite(largest):
            self._difference_max = max(largest, self._difference_max)


def write_summary(summary: Summary, path: Path) -> None:
    """Write the summary atomically, since readers poll for this file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())


def _mean(values: list[float]) -> float | None:
    return _rounded(sum(values) / len(values)) if values else None


def _fraction(part: float, whole: float) -> float | None:
    return _rounded(min(max(part / whole, 0.0), 1.0)) if whole > 0 else None


def _rounded(value: float) -> float:
    return round(value, 6)
