"""State of a run, from the files of its run directory."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.observability.heartbeat import read_balance, standing_line
from miles_async.observability.metrics_file import FILE_NAME, read_metrics
from miles_async.runtime.files.run_directory import LEDGER_FILE
from miles_async.runtime.json_texts import decoded_object
from miles_async.runtime.processes.run_process import RunProcess, find_driver, find_keeper
from miles_async.runtime.texts import last_lines
from miles_async.types import JsonObject
from miles_async.watch.run import Run

WARNINGS = 5  # the last ones that the command shows
LOG_TAIL = 1 << 20  # bytes of each log that are searched for warnings

State = Literal["running", "restarting", "over", "unknown"]
"""restarting: between two lives of --max-run-restarts; unknown: its driver is on another machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    run_dir: str
    state: State
    host: str
    pid: int
    started: float  # seconds since 1970
    ending: str | None  # of summary.json; None: it is running, or was killed
    error: str | None
    steps: int | None  # --num-rollout
    quiet_seconds: float | None  # since the last line of metrics
    metrics: Mapping[str, float]  # of the last trained step; empty before the first
    eval_step: int | None  # of the last evaluation
    eval_reward: float | None
    checkpoint: int | None  # step of the last one
    groups: Mapping[str, int]  # the balance; empty without a ledger
    standing: str  # where they stand, and what the run waits for
    changes: Sequence[str]  # of settings while it was live, and requests, in order
    warnings: Sequence[JsonObject]  # the last ones, as the logs have them


def read_rows(run_dir: Path) -> list[JsonObject]:
    """Rows of metrics.jsonl; none if there is no such file yet."""
    try:
        return read_metrics(run_dir / FILE_NAME)
    except FileNotFoundError:  # it has just begun
        return []


def read_status(run_dir: Path, run: RunProcess, rows: Sequence[JsonObject]) -> Status:
    """Read the whole status. ``rows``: of metrics.jsonl."""
    seen = Run(run_dir, run_dir.name)
    summary = seen.summary()
    evaluated = [row for row in rows if "eval/reward" in row]
    saved = [row["step"] for row in rows if "checkpoint/write_seconds" in row]
    ledger = run_dir / LEDGER_FILE
    balance = read_balance(ledger)
    return Status(
        run_dir=str(run_dir),
        state=state_of(run, summary),
        host=run.host,
        pid=run.pid,
        started=run.started,
        ending=summary.get("ending"),
        error=summary.get("error"),
        steps=seen.total_steps,
        quiet_seconds=seconds_since(max(row["time"] for row in rows)) if rows else None,
        metrics=numbers(trained[-1]) if (trained := trained_rows(rows)) else {},
        eval_step=evaluated[-1]["step"] if evaluated else None,
        eval_reward=evaluated[-1]["eval/reward"] if evaluated else None,
        checkpoint=max(saved, default=None),
        groups={} if balance is None else balance.summary(),
        standing="" if balance is None else standing_line(balance, ledger),
        changes=[str(change) for change in seen.changes()],
        warnings=last_warnings(run_dir),
    )


def state_of(run: RunProcess, summary: JsonObject) -> State:
    """Judge by the run's processes where they are on this machine, and by summary.json elsewhere."""
    if run.host != socket.gethostname():
        return "over" if "ending" in summary else "unknown"
    if find_driver(run) is not None:
        return "running"
    return "over" if find_keeper(run) is None else "restarting"


def trained_rows(rows: Sequence[JsonObject]) -> list[JsonObject]:
    """The rows of trained steps, without rows that only have an evaluation or a checkpoint."""
    return [row for row in rows if "time/step_seconds" in row]


def numbers(row: JsonObject) -> dict[str, float]:
    """The metrics of a row that were measured."""
    return {name: value for name, value in row.items() if value is not None}  # None: not a number


def last_warnings(run_dir: Path, count: int = WARNINGS) -> list[JsonObject]:
    """The last warnings and errors of driver and rollout side, in order of time."""
    found: list[JsonObject] = []
    for name in ("driver", "rollout"):
        for line in last_lines(run_dir / "logs" / f"{name}.log", LOG_TAIL):
            entry = decoded_object(line)  # some are torn, or no entries
            if entry.get("level") in ("warning", "error", "critical"):
                found.append({"side": name, **entry})
    return sorted(found, key=lambda entry: str(entry.get("timestamp", "")))[-count:]


def seconds_since(moment: float) -> float:
    """Seconds from ``moment`` (since 1970, by this machine's clock) until now; 0 if it lies ahead."""
    return max(0.0, time.time() - moment)
