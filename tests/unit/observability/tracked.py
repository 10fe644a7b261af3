"""Runs with trackers: restarted ones, and ones whose tracker cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.trackers import open_trackers
from miles_async.runtime.processes.restarts import RunRestart, restarts_variable


def restarted(monkeypatch: pytest.MonkeyPatch, *run_dirs: Path) -> None:
    """Let this process be the next start of a run whose earlier starts have these directories."""
    restarts = [RunRestart(at=0.0, reason="a node was lost", run_dir=str(path), checkpoint=None) for path in run_dirs]
    for name, value in restarts_variable(restarts).items():
        monkeypatch.setenv(name, value)


def require_that_metrics_are_written(arguments: ObservabilityArguments) -> None:
    """Log a step, which is in the run directory whatever becomes of the other trackers."""
    trackers = open_trackers(arguments, {})
    trackers.log({"reward/mean": 0.5}, step=1)
    trackers.finish()
    assert '"reward/mean": 0.5' in (arguments.run_dir / "metrics.jsonl").read_text()
