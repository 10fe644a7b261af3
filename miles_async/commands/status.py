"""``miles-async status``: where a run stands, by the files of its run directory alone."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.config_file import read_config_file
from miles_async.commands.parser import CommandParser
from miles_async.errors import ConfigurationError
from miles_async.observability.heartbeat import read_balance, standing_line
from miles_async.observability.metrics_file import FILE_NAME, read_metrics
from miles_async.observability.progress import step_line
from miles_async.observability.progress_state import ProgressState, duration
from miles_async.runtime.files.run_directory import CONFIG_FILE, LEDGER_FILE, check_directory
from miles_async.runtime.processes.run_process import RunProcess, find_driver, read_run_process
from miles_async.types import JsonObject

WARNINGS = 5  # the last ones that are shown
LONGEST_WARNING = 200  # characters
LOG_TAIL = 1 << 20  # bytes of each log that are searched for warnings
_OWN_PLACE = ("side", "level", "timestamp", "event", "logger", "exception")  # of a log entry, or left out

State = Literal["running", "over", "unknown"]
"""unknown: its driver is on another machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Where a run stands."""

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
    warnings: Sequence[JsonObject]  # the last ones, as the logs have them


def status(words: Sequence[str]) -> str:
    """Return the output of ``miles-async status``. Raises ConfigurationError: it is no run directory."""
    parser = CommandParser(
        prog="miles-async status",
        description="Show where a run stands: whether it is alive, its last step, its groups and what it waits for, "
        "its last warnings. It only reads the run directory.",
    )
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(words)
    run_dir = parsed.directory
    check_directory(run_dir)
    run = read_run_process(run_dir)
    rows = _rows(run_dir)
    found = _status(run_dir, run, rows)
    return json.dumps(asdict(found)) + "\n" if parsed.json else "".join(f"{line}\n" for line in _lines(found, rows))


def _rows(run_dir: Path) -> list[JsonObject]:
    try:
        return read_metrics(run_dir / FILE_NAME)
    except FileNotFoundError:  # it has just begun
        return []


def _status(run_dir: Path, run: RunProcess, rows: Sequence[JsonObject]) -> Status:
    here = run.host == socket.gethostname()
    summary: JsonObject = {}
    with suppress(OSError, ValueError):
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    evaluated = [row for row in rows if "eval/reward" in row]
    saved = [row["step"] for row in rows if "checkpoint/write_seconds" in row]
    balance = read_balance(run_dir / LEDGER_FILE)
    alive = here and find_driver(run) is not None
    return Status(
        run_dir=str(run_dir),
        state="running" if alive else "over" if here or "ending" in summary else "unknown",
        host=run.host,
        pid=run.pid,
        started=run.started,
        ending=summary.get("ending"),
        error=summary.get("error"),
        steps=_total_steps(run_dir),
        quiet_seconds=time.time() - max(row["time"] for row in rows) if rows else None,
        metrics=_numbers(trained[-1]) if (trained := trained_rows(rows)) else {},
        eval_step=evaluated[-1]["step"] if evaluated else None,
        eval_reward=evaluated[-1]["eval/reward"] if evaluated else None,
        checkpoint=max(saved, default=None),
        groups={} if balance is None else balance.summary(),
        standing="" if balance is None else standing_line(balance),
        warnings=_warnings(run_dir),
    )


def trained_rows(rows: Sequence[JsonObject]) -> list[JsonObject]:
    """The rows of trained steps, without rows that only have an evaluation or a checkpoint."""
    return [row for row in rows if "time/step_seconds" in row]


def _numbers(row: JsonObject) -> dict[str, float]:
    return {name: value for name, value in row.items() if value is not None}  # None: not a number


def _total_steps(run_dir: Path) -> int | None:
    with suppress(ConfigurationError):  # absent, or of another version
        return int(str(read_config_file(run_dir / CONFIG_FILE)[0]["num_rollout"]))
    return None


def _warnings(run_dir: Path) -> list[JsonObject]:
    """The last warnings and errors of driver and rollout side, in order of time."""
    found: list[JsonObject] = []
    for name in ("driver", "rollout"):
        for line in _last_lines(run_dir / "logs" / f"{name}.log"):
            with suppress(ValueError):  # torn by the end of a process, or by where the tail begins
                entry = json.loads(line)
                if entry.get("level") in ("warning", "error", "critical"):
                    found.append({"side": name, **entry})
    return sorted(found, key=lambda entry: str(entry.get("timestamp", "")))[-WARNINGS:]


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _lines(found: Status, rows: Sequence[JsonObject]) -> Iterator[str]:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.started))
    states = {"running": "running", "over": "over", "unknown": f"unknown from here: ask on {found.host}"}
    ended = found.ending or ("killed, or lost with its machine" if found.state == "over" else "")
    yield f"{found.run_dir}: {states[found.state]}" + (f", {ended}" if ended else "")
    yield f"  process {found.pid} on {found.host}, since {since}"
    if found.error:
        yield f"  error: {found.error}"
    progress = ProgressState(found.steps or 0)
    for row in trained_rows(rows):
        progress.add_step(row["step"], _numbers(row))
    yield f"  {step_line(progress.view)}" if progress.view else "  no step yet"
    if found.state != "over" and found.quiet_seconds is not None:
        yield f"  last metrics {duration(max(0.0, found.quiet_seconds))} ago"
    if found.eval_reward is not None:
        yield f"  evaluation after {found.eval_step} steps: mean reward {found.eval_reward:.3f}"
    if found.checkpoint is not None:
        yield f"  last checkpoint: step {found.checkpoint}"
    if found.standing and found.state != "over":
        yield f"  {found.standing}"
    elif found.groups:
        yield "  groups: " + ", ".join(f"{count} {name}" for name, count in found.groups.items() if count)
    for entry in found.warnings:
        yield f"  {_warning(entry)}"


def _warning(entry: JsonObject) -> str:
    fields = {name: value for name, value in entry.items() if name not in _OWN_PLACE}
    details = "".join(f" {name}={value}" for name, value in fields.items())
    line = " ".join(f"{entry.get('level')} at {entry.get('timestamp')}: {entry.get('event')}{details}".split())
    return line if len(line) <= LONGEST_WARNING else f"{line[: LONGEST_WARNING - 3]}..."
