"""Clocks that are wrong, or are set while a run goes on, on any of its machines."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import msgspec
import psutil
import pytest

from miles_async.ledger.reader import open_ledger
from miles_async.ledger.store import LedgerStore
from miles_async.ledger.story import tell
from miles_async.runtime.processes.run_process import find_driver, note_run_process, read_run_process
from miles_async.staleness.events import Ended, Issued
from miles_async.staleness.ledger import Outcome
from miles_async.types import Attempt, Prompt

# covers: A6, C10

SOURCES = Path(__file__).parents[3] / "miles_async"
WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}

# Each writes times down for people, of one machine; none compares them, or decides by them.
TELLERS = {
    "runs/keep_running.py",
    "commands/migrate/printed.py",
    "engines/client.py",
    "engines/registry.py",
    "engines/reports.py",
    "integrations/nemo_gym_episodes.py",
    "watch/status.py",
    "ledger/queued_writer.py",
    "observability/metrics_file.py",
    "observability/mlflow_tracker.py",
    "observability/prometheus_tracker.py",
    "observability/tensorboard_tracker.py",
    "prompts/templates.py",
    "samples/evaluation.py",
    "samples/recorder.py",
    "sessions/protocols/chat_completions.py",
    "sessions/protocols/responses.py",
    "trainer/actor.py",
}
DOCTOR = {"machine/cluster.py", "machine/network.py"}  # they tell a clock that is wrong


def test_nothing_is_decided_by_a_wall_clock() -> None:
    """So it makes no difference how far the clocks of two machines are apart."""
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if (node.value.id, node.attr) in WALL_CLOCKS
    }
    assert found == TELLERS | DOCTOR


def test_a_driver_is_found_though_the_clock_was_set_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_ASYNC_RUN", "")
    note_run_process(tmp_path, tmp_path / "control")
    run = read_run_process(tmp_path)
    # What psutil makes of the time since boot moves with the clock.
    created = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + 600.0)
    driver = find_driver(run)
    assert driver.pid == os.getpid()
    later = msgspec.structs.replace(run, start_ticks=run.start_ticks + 1)
    assert find_driver(later) is None


def test_a_ledger_is_whole_though_the_clock_was_set_back(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger.sqlite")
    attempt = Attempt(attempt_id=1, prompt=Prompt(prompt_id="p", token_ids=(1,), text="p"), epoch=0, issued_version=0)
    store.write([(10_000.0, Issued(attempt=attempt))])
    store.write([(9_400.0, Ended(attempt_id=1, outcome=Outcome.CANCELLED))])
    store.close()
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.balance().summary()["cancelled"] == 1
        (record,) = ledger.find("1")
        assert "cancelled" in tell(record, started_at=ledger.started_at())
