"""The overview: the run's state, curves, ages, groups and problems."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from miles_async.errors import ConfigurationError, LedgerError
from miles_async.ledger.reader import ChangeRecord
from miles_async.observability.heartbeat import standing_line
from miles_async.observability.metrics_file import AGE_COUNT
from miles_async.observability.plots import moving_average
from miles_async.observability.progress_state import AVERAGE_WINDOW, TIME_WINDOW
from miles_async.runtime.files.run_directory import LEDGER_FILE, find_run
from miles_async.types import JsonObject
from miles_async.watch.metrics_table import MetricsTable, Series, down_sampled, encoded_series
from miles_async.watch.run import Run
from miles_async.watch.status import last_warnings, seconds_since, state_of

POINTS = 800  # of a curve
STRIP = 240  # columns of the strip of ages
MOST_WARNINGS = 50
MOST_REASONS = 20
BOUND = "max-weight-staleness"
LATELY = 1_000  # attempts by which the idle time of the rollout side is judged during a run
PAGES: Mapping[str, str] = {  # by the room that warns
    "engines": "docs/engines.md",
    "weights": "docs/weights.md",
    "rollout": "docs/failures.md",
    "rewards": "docs/rewards.md",
    "sessions": "docs/agents.md",
    "checkpoints": "docs/checkpoints.md",
    "bad_steps": "docs/algorithms.md",
    "prompts": "docs/prompts.md",
    "runtime": "docs/failures.md",
    "controller": "docs/failures.md",
    "wiring": "docs/operating.md",
    "trainer": "docs/failures.md",
}
_FLAG = re.compile(r"--[a-z][a-z0-9-]+")
_ENTRY = ("side", "level", "timestamp", "event", "logger", "exception")  # the rest are an event's own fields


def standing(run: Run) -> JsonObject:
    """One line about a run, for the list of runs."""
    run.metrics.refresh()
    summary = run.summary()
    found: dict[str, object] = {
        "name": run.name,
        "directory": str(run.directory),
        "state": "over" if "ending" in summary else "unknown",
        "missing": not run.directory.is_dir(),
        "ending": summary.get("ending"),
        "error": summary.get("error"),
        "step": _last_step(run.metrics),
        "steps": run.total_steps,
    }
    with suppress(ConfigurationError):  # no run.json, or of another version
        _, process = find_run(run.directory)
        found |= {"state": state_of(process, summary), "host": process.host, "pid": process.pid}
        found["started"] = process.started
    return found


def overview(run: Run) -> JsonObject:
    found, changes = standing(run), run.changes()
    groups, reasons, line, notes = _groups(run)
    rewards = run.metrics.series("reward/mean")
    averaged = Series(rewards.steps, moving_average(rewards.values))
    return {
        "run": found,
        "tiles": _tiles(run, changes, running=found["state"] != "over"),
        "curves": {
            name: encoded_series(down_sampled(run.metrics.series(name), POINTS))
            for name in ("reward/mean", "eval/reward", "train/loss")
        }
        | {"averaged": encoded_series(down_sampled(averaged, POINTS))},
        "averaged_steps": AVERAGE_WINDOW,
        "ages": ages(run.metrics),
        "groups": groups,
        "reasons": reasons,
        "changes": [str(change) for change in changes],
        "standing": line if found["state"] != "over" else "",
        "warnings": [_warning(entry) for entry in reversed(last_warnings(run.directory, MOST_WARNINGS))],
        "notes": [*run.metrics.notes, *notes],
    }


def ages(metrics: MetricsTable) -> JsonObject:
    """Samples trained per age, over stretches of steps: {"from": [c], "to": [c], "ages": [a], "counts": [a][c]}."""
    names = [name for name in metrics.names if name.startswith(AGE_COUNT)]
    found = sorted((int(name.removeprefix(AGE_COUNT)), metrics.series(name)) for name in names)
    steps = np.unique(np.concatenate([series.steps for _, series in found])) if found else np.array([], dtype=np.int64)
    if not len(steps):
        return {"from": [], "to": [], "ages": [], "counts": []}
    starts = np.unique(np.linspace(0, len(steps), min(STRIP, len(steps)) + 1).astype(int))[:-1]
    counts = []
    for _, series in found:
        whole = np.zeros(len(steps))
        whole[np.searchsorted(steps, series.steps)] = series.values
        counts.append(np.add.reduceat(whole, starts).tolist())
    ends = np.append(starts[1:], len(steps)) - 1
    return {
        "from": steps[starts].tolist(),
        "to": steps[ends].tolist(),
        "ages": [age for age, _ in found],
        "counts": counts,
    }


def _last_step(metrics: MetricsTable) -> int:
    steps = metrics.series("time/step_seconds").steps
    return int(steps[-1]) if len(steps) else 0


def _tiles(run: Run, changes: Sequence[ChangeRecord], *, running: bool) -> JsonObject:
    metrics, summary = run.metrics, run.summary()
    seconds = metrics.series("time/step_seconds").values
    wait = metrics.series("time/wait_seconds").values
    tokens = metrics.series("train/tokens").values
    rewards = metrics.series("reward/mean").values
    recent = float(seconds[-TIME_WINDOW:].mean()) if len(seconds) else None
    total, done = run.total_steps, _last_step(metrics)
    saved = metrics.series("checkpoint/write_seconds").steps
    evaluated = metrics.series("eval/reward")
    bounds = [run.flags().get("staleness", {}).get(BOUND), *(each.value for each in changes if each.name == BOUND)]
    return {
        "reward": float(rewards[-AVERAGE_WINDOW:].mean()) if len(rewards) else None,
        "reward_steps": min(AVERAGE_WINDOW, len(rewards)),
        "eval_reward": float(evaluated.values[-1]) if len(evaluated.values) else None,
        "eval_step": int(evaluated.steps[-1]) if len(evaluated.steps) else None,
        "loss": metrics.last("train/loss"),
        "age_mean": metrics.last("age/mean"),
        "age_max": metrics.last("age/max"),
        "max_weight_staleness": bounds[-1],
        "step_seconds": recent,
        "tokens_per_second": _rate(tokens, seconds),
        "eta_seconds": recent * (total - done) if running and recent is not None and total else None,
        "trainer_idle": float(wait.sum() / seconds.sum()) if len(seconds) and len(wait) and seconds.sum() else None,
        "rollout_idle": summary.get("rollout_idle_fraction"),
        "rollout_idle_lately": _idle_lately(run),
        "weight_version": summary.get("weight_version"),
        "stepped_from": metrics.last("weight_version/trainer"),
        "checkpoint": int(saved[-1]) if len(saved) else None,
        "quiet_seconds": seconds_since(metrics.last_time) if running and metrics.last_time is not None else None,
    }


def _idle_lately(run: Run) -> float | None:
    try:
        with run.ledger() as reader:
            return None if reader is None else idle_share(reader.spans(LATELY))
    except LedgerError:
        return None


def idle_share(spans: Sequence[tuple[float, float | None]]) -> float | None:
    """Share of the time from the first begin to the last known moment in which no span was under way.

    >>> idle_share([(0.0, 2.0), (1.0, 3.0), (6.0, 8.0)])
    0.375
    """
    known = [moment for span in spans for moment in span if moment is not None]
    if not known or max(known) == min(known):
        return None
    last, idle, busy_until = max(known), 0.0, min(known)
    for start, end in sorted(spans, key=lambda span: span[0]):
        idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, last if end is None else end)
    return idle / (last - min(known))


def _rate(tokens: np.ndarray, seconds: np.ndarray) -> float | None:
    """Trained tokens per second over the last steps."""
    count = min(TIME_WINDOW, len(tokens), len(seconds))
    return float(tokens[-count:].sum() / seconds[-count:].sum()) if count and seconds[-count:].sum() else None


def _groups(run: Run) -> tuple[JsonObject, list[JsonObject], str, list[str]]:
    """(the balance, the most common reasons, what the run waits for, what could not be read)."""
    try:
        balance = run.balance()
    except LedgerError as error:
        return {}, [], "", [str(error)]
    if balance is None:
        return run.summary().get("groups", {}), [], "", []
    reasons = sorted(balance.reasons.items(), key=lambda item: -item[1])[:MOST_REASONS]
    split = [(*text.partition(": ")[::2], count) for text, count in reasons]
    return (
        balance.summary(),
        [{"outcome": outcome, "reason": reason, "count": count} for outcome, reason, count in split],
        standing_line(balance, run.directory / LEDGER_FILE),
        [],
    )


def _warning(entry: JsonObject) -> JsonObject:
    fields = {name: value for name, value in entry.items() if name not in _ENTRY}
    text = json.dumps([entry.get("event"), fields])
    room = str(entry.get("logger", "")).removeprefix("miles_async.").split(".")[0]
    return {
        "side": entry.get("side"),
        "level": entry.get("level"),
        "timestamp": entry.get("timestamp"),
        "event": str(entry.get("event")),
        "fields": {name: str(value) for name, value in fields.items()},
        "flags": sorted({*_FLAG.findall(text)}),
        "page": PAGES.get(room),
    }
