"""``miles-async status``: where a run stands, by the files of its run directory alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from miles_async.commands.parser import CommandParser
from miles_async.observability.progress import step_line
from miles_async.observability.progress_state import ProgressState, duration
from miles_async.runtime.files.run_directory import find_run
from miles_async.types import JsonObject
from miles_async.watch.status import Status, numbers, read_rows, read_status, trained_rows

LONGEST_WARNING = 200  # characters
CHANGES = 5  # the last settings changed while the run was live
_OWN_PLACE = ("side", "level", "timestamp", "event", "logger", "exception")  # of a log entry, or left out


def status(words: Sequence[str]) -> str:
    """Return the output of ``miles-async status``. Raises ConfigurationError: it is not a run directory."""
    parser = CommandParser(
        prog="miles-async status",
        description="Show where a run stands: whether it is alive, its last step, its groups and what it waits for, "
        "its last warnings. It only reads the run directory.",
    )
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(words)
    run_dir, run = find_run(parsed.directory)
    rows = read_rows(run_dir)
    found = read_status(run_dir, run, rows)
    return json.dumps(asdict(found)) + "\n" if parsed.json else "".join(f"{line}\n" for line in _lines(found, rows))


def _lines(found: Status, rows: Sequence[JsonObject]) -> Iterator[str]:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.started))
    states = {
        "running": "running",
        "restarting": "between two lives: it is being restarted",
        "over": f"over, {found.ending or 'killed, or lost with its machine'}",
        "unknown": f"unknown from here: ask on {found.host}",
    }
    yield f"{found.run_dir}: {states[found.state]}"
    yield f"  process {found.pid} on {found.host}, since {since}"
    if found.error:
        yield f"  error: {found.error}"
    progress = ProgressState(found.steps or 0)
    for row in trained_rows(rows):
        progress.add_step(row["step"], numbers(row))
    yield f"  {step_line(progress.view, over=found.state == 'over')}" if progress.view else "  no step yet"
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
    for change in found.changes[-CHANGES:]:
        yield f"  set {change}"
    for entry in found.warnings:
        yield f"  {_warning(entry)}"


def _warning(entry: JsonObject) -> str:
    fields = {name: value for name, value in entry.items() if name not in _OWN_PLACE}
    details = "".join(f" {name}={value}" for name, value in fields.items())
    line = " ".join(f"{entry.get('level')} at {entry.get('timestamp')}: {entry.get('event')}{details}".split())
    return line if len(line) <= LONGEST_WARNING else f"{line[: LONGEST_WARNING - 3]}..."
