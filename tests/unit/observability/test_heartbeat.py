"""The heartbeat: what a run says while no step comes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

from miles_async.ledger.store import LedgerStore
from miles_async.observability.heartbeat import LONGEST_REASON, commonest_reason, heartbeat, read_balance, standing_line
from miles_async.observability.progress import Progress
from miles_async.observability.progress_state import ProgressState
from miles_async.observability.recorder import RunRecorder
from miles_async.observability.summary import RunSummary
from miles_async.observability.trackers import CompositeTracker
from miles_async.staleness.events import Changed, Ended, Issued
from miles_async.staleness.ledger import Outcome
from miles_async.types import Changes
from tests.property.builders import make_attempt


def _ledger(path: Path, reasons: list[str], in_flight: int = 1) -> None:
    store = LedgerStore(path)
    count = len(reasons) + in_flight
    store.write([(1.0, Issued(attempt=make_attempt(number))) for number in range(1, count + 1)])
    store.write(
        [
            (2.0, Ended(attempt_id=number, outcome=Outcome.FILTERED, reason=reason))
            for number, reason in enumerate(reasons, start=1)
        ]
    )
    store.close()


def test_a_run_that_filters_everything_is_not_silent(tmp_path: Path) -> None:
    ledger, lines, heard = tmp_path / "ledger.sqlite", [], asyncio.Event()
    _ledger(ledger, ["zero_std", "mine", "zero_std"])

    def write(line: str) -> None:
        lines.append(line)
        heard.set()

    async def quiet_run() -> None:
        async with heartbeat(Progress(ProgressState(2), write), ledger, seconds=0.02), asyncio.timeout(20):
            await heard.wait()

    asyncio.run(quiet_run())
    assert lines[0] == (
        "no step for 0:00: 1 group in flight, 0 buffered, 3 of 3 finished ones filtered (mostly: zero_std); "
        "the trainer waits for groups in flight"
    )


def test_weights_that_are_published_are_not_what_a_quiet_run_waits_for(tmp_path: Path) -> None:
    lines: list[str] = []
    progress = Progress(ProgressState(2), lines.append)
    recorder = RunRecorder(CompositeTracker([]), progress, RunSummary())
    progress.phase("the first publication")
    for version in (0, 1):
        recorder.publication(SimpleNamespace(version=version, pause_seconds=0.1, prepare_seconds=0.2))
        progress.heartbeat("")
        recorder.step(version + 1, {"reward/mean": 0.5}, {0: 1})
    assert [line for line in lines if not line.startswith("step")] == [
        "starting the first publication ...",
        "the first publication ready after 0.0 s",
        "starting the first step ...",
        "still starting the first step after 0:00",
        "the first step ready after 0.0 s",
        "no step for 0:00",
    ]


def test_a_run_without_a_ledger_yet_beats_too(tmp_path: Path) -> None:
    (tmp_path / "torn.sqlite").write_bytes(b"SQLite")
    assert read_balance(tmp_path / "none.sqlite") is None
    assert read_balance(tmp_path / "torn.sqlite") is None


def test_what_a_run_waits_for(tmp_path: Path) -> None:
    for reasons, in_flight, expected in (
        ([], 0, "0 groups in flight, 0 buffered; rollouts wait for the first weights"),
        (["x"], 0, "nothing is in flight: rollouts wait for the trainer or for engines"),
    ):
        ledger = tmp_path / f"{len(reasons)}.sqlite"
        _ledger(ledger, reasons, in_flight)
        balance = read_balance(ledger)
        assert balance is not None
        assert standing_line(balance, ledger).endswith(expected)


def test_a_pause_is_what_a_run_waits_for(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    store = LedgerStore(ledger)
    store.write([(1.0, Issued(attempt=make_attempt(1))), (2.0, Ended(attempt_id=1, outcome=Outcome.FILTERED))])
    for step, (value, paused) in enumerate({"paused": True, "running": False}.items()):
        store.write([(3.0, Changed(Changes(after=step, before={}, values={"generation": value})))])
        balance = read_balance(ledger)
        assert balance is not None
        line = standing_line(balance, ledger)
        assert line.endswith("generation is paused until `miles-async set RUN_DIR generation=running`") == paused
    store.close()


def test_a_long_reason_is_one_short_line(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    _ledger(ledger, ["a\nb " * 100])
    balance = read_balance(ledger)
    assert balance is not None
    reason = commonest_reason(balance, Outcome.FILTERED)
    assert len(reason) == LONGEST_REASON
    assert "\n" not in reason
