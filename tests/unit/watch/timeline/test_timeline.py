"""The timeline of a run: in the format, with the ledger's numbers, and as much of it as was asked for."""

from __future__ import annotations

import json
import sqlite3
import zlib
from itertools import pairwise
from pathlib import Path

import msgspec
import pyarrow as arrow
import pytest
from pyarrow import parquet

from miles_async.errors import LedgerError
from miles_async.ledger.reader import AttemptRecord, open_ledger
from miles_async.observability.metrics_file import read_metrics
from miles_async.samples.columns import Turn
from miles_async.samples.files import file_of
from miles_async.types import EngineReport, EnginesReport
from miles_async.watch.run import Run
from miles_async.watch.timeline import attempts as attempts_module
from miles_async.watch.timeline import build
from miles_async.watch.timeline import requests as requests_module
from miles_async.watch.timeline.attempts import NO_ENGINE, Lanes
from miles_async.watch.timeline.build import Part, write_timeline
from miles_async.watch.timeline.steps import DELIVERY, TURNS
from tests.unit.samples.sample_rows import row, write_samples
from tests.unit.watch.run_files import write_finished_run
from tests.unit.watch.timeline.trace_files import (
    MICROSECOND,
    Count,
    Trace,
    number,
    read_trace,
    recorded_run,
    seconds_by_name,
    text,
)

STEPS = 6
WHOLE = Part()
CLOSE = 0.05  # seconds between events of two processes that belong together


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return recorded_run(tmp_path / "run")


def timeline(run_dir: Path, part: Part = WHOLE) -> Trace:
    path = run_dir / build.FILE_NAME
    write_timeline(Run(run_dir, "run"), path, part)
    return read_trace(path)


def records(run_dir: Path) -> list[AttemptRecord]:
    with open_ledger(run_dir / "ledger.sqlite") as reader:
        return [*reader.alive_since(0.0)]


def origin(trace: Trace) -> float:
    return float(trace.otherData["time 0"].split()[0])


def test_attempts_are_on_their_engines_with_the_times_of_the_ledger(run_dir: Path) -> None:
    trace = timeline(run_dir)
    found = records(run_dir)
    for engine in ("engine-0", "engine-1"):
        spans = {span.name: span for span in trace.spans(engine)}
        of_engine = {f"attempt {each.attempt_id}": each for each in found if engine in (each.engines or ())}
        assert spans.keys() == of_engine.keys()
        for name, record in of_engine.items():
            assert record.finished_at is not None
            span = spans[name]
            assert span.ts * MICROSECOND + origin(trace) == pytest.approx(record.issued_at, abs=2e-6)
            assert span.dur * MICROSECOND == pytest.approx(record.finished_at - record.issued_at, abs=2e-6)
            assert span.cat == record.outcome
            assert text(span, "prompt") == record.prompt_id
            assert number(span, "response tokens") == sum(record.response_lengths or ())


def test_attempts_in_flight_end_with_the_file(run_dir: Path) -> None:
    trace = timeline(run_dir)
    in_flight = trace.spans(NO_ENGINE)
    assert {span.name for span in in_flight} == {
        f"attempt {each.attempt_id}" for each in records(run_dir) if each.outcome is None
    }
    last = max(event.end for events in trace.tracks().values() for event in events if hasattr(event, "end"))
    assert len(in_flight) == 2
    assert {span.end for span in in_flight} == {last}


def test_counts_of_groups_are_those_of_the_ledger(run_dir: Path) -> None:
    trace = timeline(run_dir)
    counts = [event for event in trace.tracks()["pool", "groups in flight"] if isinstance(event, Count)]
    found = records(run_dir)
    for count in counts[:-1]:
        at = origin(trace) + count.ts * MICROSECOND + 2e-6
        in_flight = sum(each.issued_at <= at and (each.finished_at is None or each.finished_at > at) for each in found)
        assert abs(number(count, "value") - in_flight) <= 1  # two events may be closer than a microsecond is exact
    assert max(number(count, "value") for count in counts) == 32


def test_nothing_in_flight_is_a_span_wherever_the_count_is_zero(run_dir: Path) -> None:
    trace = timeline(run_dir)
    idle = trace.spans("pool", "nothing in flight")
    assert idle
    busy = [(each.issued_at, each.finished_at or each.ended_at) for each in records(run_dir)]
    for span in idle:
        middle = origin(trace) + (span.ts + span.dur / 2) * MICROSECOND
        assert not any(start <= middle and (end is None or middle < end) for start, end in busy)


def test_cuts_are_those_of_the_ledger(run_dir: Path) -> None:
    trace = timeline(run_dir)
    cuts = trace.tracks()["pool", "cuts"]
    assert [number(cut, "version") for cut in cuts] == sorted(
        {each.target_version for each in records(run_dir) if each.target_version is not None}
    )
    assert sum(number(cut, "groups") for cut in cuts) == sum(each.cut_at is not None for each in records(run_dir))


def test_settings_that_were_changed_are_marked_when_they_took_effect(run_dir: Path) -> None:
    at = records(run_dir)[-1].issued_at
    with sqlite3.connect(run_dir / "ledger.sqlite") as connection:
        connection.execute("INSERT INTO changes VALUES (4, 'lr', '0.0005', '0.0004', ?)", (at,))
        connection.execute("INSERT INTO changes VALUES (4, 'evaluation', 'null', '\"now\"', ?)", (at,))
    trace = timeline(run_dir)
    lr, evaluation = trace.tracks()["events", "settings changed"]
    assert (lr.name, evaluation.name) == ("lr 0.0005 → 0.0004", "evaluation now")
    assert (number(lr, "after step"), number(lr, "before"), number(lr, "value")) == (4, 0.0005, 0.0004)
    assert origin(trace) + lr.ts * MICROSECOND == pytest.approx(at, abs=2 * MICROSECOND)


def test_steps_have_the_durations_of_the_metrics_and_their_training_ends_when_the_ledger_says(run_dir: Path) -> None:
    trace = timeline(run_dir)
    steps = trace.spans("trainer", "steps", "step")
    parts = trace.spans("trainer", "steps", "part of a step")
    rows = {row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"]}
    trained = {each.step: each.ended_at for each in records(run_dir) if each.step}
    assert [step.name for step in steps] == [f"step {number}" for number in rows]
    for step, measured in zip(steps, rows.values(), strict=True):
        assert step.dur * MICROSECOND == pytest.approx(measured["time/step_seconds"], abs=2e-6)
        inside = [part for part in parts if step.ts <= part.ts < step.end]
        seconds = seconds_by_name(inside)
        assert sum(part.dur for part in inside) == pytest.approx(step.dur, abs=5)
        assert seconds["train"] == pytest.approx(measured["time/train_seconds"], abs=2e-6)
        waits = seconds["wait for the batch"] + seconds["wait for the publication"]
        assert waits == pytest.approx(measured["time/wait_seconds"], abs=5e-6)
        (train,) = (part for part in inside if part.name == "train")
        assert origin(trace) + train.end * MICROSECOND == pytest.approx(trained[measured["step"]], abs=0.01)
    gaps = [(after.ts - before.end) * MICROSECOND for before, after in pairwise(steps)]
    assert all(0 <= gap < CLOSE for gap in gaps)


def test_publications_have_their_phases_and_end_when_their_version_is_visible(run_dir: Path) -> None:
    trace = timeline(run_dir)
    rows = {row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"]}
    spans = trace.spans("publications")
    versions = [span for span in spans if span.name.startswith("version ")]
    assert [span.name for span in versions] == [f"version {number}" for number in rows]
    for version, measured in zip(versions, rows.values(), strict=True):
        inside = seconds_by_name([span for span in spans if version.ts <= span.ts and span.end <= version.end])
        for phase in DELIVERY:
            assert inside[phase] == pytest.approx(measured[f"publish/{phase}_seconds"], abs=5e-6)
        assert origin(trace) + version.end * MICROSECOND <= measured["time"] + 1e-5
        first = [each.issued_at for each in records(run_dir) if each.issued_version == int(version.name.split()[1])]
        if first:
            assert origin(trace) + version.end * MICROSECOND == pytest.approx(min(first), abs=CLOSE)


def test_where_engines_took_turns_their_phases_are_one_span(run_dir: Path) -> None:
    (run_dir / "config.toml").write_text('[weights]\npublish-order = "rolling"\n')
    spans = timeline(run_dir).spans("publications")
    assert {span.name for span in spans} & {*DELIVERY} == set()
    turns = [span.dur * MICROSECOND for span in spans if span.name == TURNS]
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"]]
    assert turns == pytest.approx(
        [sum(row[f"publish/{phase}_seconds"] for phase in DELIVERY) for row in rows], abs=5e-5
    )


def test_engines_have_their_last_pauses(run_dir: Path) -> None:
    start = records(run_dir)[0].issued_at
    pauses = ((start + 1, start + 1.5), (start + 2, None))
    engines = {"engine-1": EngineReport(state="serving", load=None, pauses=pauses)}
    report = EnginesReport(time=start + 3, engines=engines)
    (run_dir / "engines.json").write_bytes(msgspec.json.encode(report))
    trace = timeline(run_dir)
    spans = trace.spans("engine-1", "paused")
    assert [span.dur * MICROSECOND for span in spans] == pytest.approx([0.5, 1.0], abs=1e-5)
    assert origin(trace) + spans[0].ts * MICROSECOND == pytest.approx(pauses[0][0], abs=1e-5)


def test_a_checkpoint_blocks_first_and_is_then_written(tmp_path: Path) -> None:
    line = {"kind": "checkpoint", "step": 3, "time": 100.0}
    seconds = {"checkpoint/blocked_seconds": 2.0, "checkpoint/write_seconds": 5.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**line, **seconds}))
    whole, waits, write = timeline(tmp_path).spans("trainer", "checkpoints")
    assert (whole.name, whole.dur * MICROSECOND) == ("checkpoint of step 3", 7.0)
    assert (waits.ts, waits.dur * MICROSECOND, write.dur * MICROSECOND) == (whole.ts, 2.0, 5.0)


def test_an_evaluation_begins_when_its_step_was_recorded_and_the_one_before_is_over(run_dir: Path) -> None:
    lines = [
        {"kind": "step", "step": 1, "time": 10.0, "time/step_seconds": 1.0},
        {"kind": "step", "step": 2, "time": 20.0, "time/step_seconds": 1.0},
        {"kind": "evaluation", "step": 1, "time": 25.0, "eval/reward": 0.5},
        {"kind": "evaluation", "step": 2, "time": 31.0, "eval/reward": 0.75},
    ]
    (run_dir / "ledger.sqlite").unlink()
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = timeline(run_dir).spans("evaluations")
    assert (first.dur * MICROSECOND, second.dur * MICROSECOND) == (15.0, 6.0)
    assert second.ts == first.end


def test_marks_and_outages_come_from_the_logs(run_dir: Path) -> None:
    at = "2026-11-25T19:53:18Z"
    lines = [
        {"event": "restarting engine", "engine": "engine-1", "level": "warning", "timestamp": at},
        {"event": "service is back", "service": "judge", "after_seconds": 1.5, "level": "info", "timestamp": at},
        {"event": "harmless", "level": "info", "timestamp": at},
        {"event": "no time", "level": "error"},
    ]
    with (run_dir / "logs/rollout.log").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "torn')
    trace = timeline(run_dir)
    marks = [event.name for event in trace.tracks()["events", "engines"]]
    assert marks == ["engine-0: engine is up", "engine-1: engine is up", "engine-1: restarting engine"]
    (outage,) = trace.spans("events", "out of reach: judge")
    assert outage.dur * MICROSECOND == 1.5
    assert not any("harmless" in event.name for events in trace.tracks().values() for event in events)


def test_requests_of_saved_samples_are_on_the_engine_that_had_them(run_dir: Path) -> None:
    start = records(run_dir)[0].issued_at
    turns = [[Turn(start=2, end=5, started_at=start + 0.01 * number, seconds=0.25)] for number in range(3)]
    metadata = ['{"engines": ["engine-1"]}', '{"engines": ["engine-1", "engine-0"]}', "{}"]
    rows = [
        row(step=1, attempt_id=0, sample=number, turns=turns[number], metadata=metadata[number]) for number in range(3)
    ]
    write_samples(run_dir, "train", 1, rows)
    trace = timeline(run_dir)
    spans = trace.spans("engine-1", "requests")
    assert [span.name for span in spans] == ["attempt 0 sample 0", "attempt 0 sample 1"]
    assert [span.dur * MICROSECOND for span in spans] == pytest.approx([0.25, 0.25], abs=1e-6)
    assert len(trace.spans(NO_ENGINE, "requests")) == 1
    assert not trace.spans("engine-0", "requests")


@pytest.mark.parametrize(("field", "shown"), [("tokens_per_second", 1), ("end", 0)])
def test_turns_may_have_another_field_and_malformed_ones_are_left_out(run_dir: Path, field: str, shown: int) -> None:
    turn = {"start": 2, "end": 5, "started_at": records(run_dir)[0].issued_at, "seconds": 0.25, field: "text"}
    columns = {"kind": "train", "step": 1, "attempt_id": 0, "sample": 0, "branch": 0, "turns": [turn], "metadata": "{}"}
    path = file_of(run_dir / "samples", "train", 1)
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist([columns]), path)
    assert len(timeline(run_dir).spans(NO_ENGINE, "requests")) == shown


def test_old_files_of_samples_are_left_alone(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = records(run_dir)[0].issued_at
    for step in (1, 2, 3):
        turns = [Turn(start=2, end=5, started_at=at + step, seconds=0.25)]
        rows = [row(step=step, attempt_id=step, sample=number, turns=turns) for number in range(2)]
        write_samples(run_dir, "train", step, rows)

    def shown() -> list[str]:
        return [span.name for span in timeline(run_dir).spans(NO_ENGINE, "requests")]

    assert len(shown()) == 6
    monkeypatch.setattr(requests_module, "MOST_FILES", 2)
    assert sorted(shown()) == [f"attempt {step} sample {number}" for step in (2, 3) for number in range(2)]
    monkeypatch.setattr(requests_module, "MOST_REQUESTS", 1)
    assert shown() == ["attempt 3 sample 1"]


def test_the_file_is_one_gzip_member(run_dir: Path) -> None:
    timeline(run_dir)
    reader = zlib.decompressobj(wbits=31)
    reader.decompress((run_dir / build.FILE_NAME).read_bytes())
    assert (reader.eof, reader.unused_data) == (True, b"")


def test_only_the_newest_steps(run_dir: Path) -> None:
    trace = timeline(run_dir, Part(last_steps=2))
    steps = trace.spans("trainer", "steps", "step")
    assert [step.name for step in steps] == ["step 5", "step 6"]
    assert trace.otherData["steps"] == "the newest 2; earlier ones are left out"
    since = origin(trace) + steps[0].ts * MICROSECOND
    engines = {name for name, _ in trace.tracks() if "engine" in name}
    shown = {span.name for engine in engines for span in trace.spans(engine)}
    wanted = {f"attempt {x.attempt_id}" for x in records(run_dir) if x.ended_at is None or x.ended_at >= since}
    assert shown == wanted
    assert len(shown) < len(records(run_dir))


def test_the_oldest_attempts_are_left_out_and_the_file_says_so(run_dir: Path) -> None:
    trace = timeline(run_dir, Part(attempts=20))
    assert trace.otherData["attempts"] == "the newest 20; 94 that were issued before are left out"
    newest = {f"attempt {each.attempt_id}" for each in records(run_dir)[-20:]}
    shown = {span.name for engine in ("engine-0", "engine-1", NO_ENGINE) for span in trace.spans(engine)}
    assert newest <= shown
    assert len(trace.spans("trainer", "steps", "step")) == STEPS
    counts = trace.tracks()["pool", "groups in flight"]
    whole = timeline(run_dir).tracks()["pool", "groups in flight"]
    assert [number(count, "value") for count in counts][-10:] == [number(count, "value") for count in whole][-10:]


def test_only_the_newest_lines_of_the_metrics_are_kept(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MOST_LINES", 3)
    trace = timeline(run_dir)
    assert [step.name for step in trace.spans("trainer", "steps", "step")] == ["step 4", "step 5", "step 6"]
    assert trace.otherData["steps"] == "the newest 3; earlier ones are left out"


def test_counters_are_thinned_and_keep_their_peak(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "COUNTER_POINTS", 20)
    counts = timeline(run_dir).tracks()["pool", "groups in flight"]
    assert len(counts) <= 20
    assert max(number(count, "value") for count in counts) == 32


@pytest.mark.parametrize("missing", ["ledger.sqlite", "metrics.jsonl", "logs"])
def test_what_is_there_is_shown_without_the_rest(run_dir: Path, missing: str) -> None:
    (run_dir / missing).rename(run_dir / "elsewhere")
    trace = timeline(run_dir)
    processes = {process for process, _ in trace.tracks()}
    assert ("engine-0" in processes) == (missing != "ledger.sqlite")
    assert ("trainer" in processes) == (missing != "metrics.jsonl")
    assert ("events" in processes) == (missing != "logs")


def test_a_ledger_that_cannot_be_read_is_named_in_the_file(run_dir: Path) -> None:
    (run_dir / "ledger.sqlite").write_bytes(b"no database" * 100)
    trace = timeline(run_dir)
    assert trace.otherData["ledger"].startswith("could not be read: ")
    assert len(trace.spans("trainer", "steps", "step")) == STEPS


def test_an_empty_run_gives_an_empty_trace(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert timeline(tmp_path).traceEvents == []


def test_torn_lines_and_steps_of_other_runs_are_no_obstacle(tmp_path: Path) -> None:
    run_dir = write_finished_run(tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 41, "ti')
    trace = timeline(run_dir)
    assert len(trace.spans("trainer", "steps", "step")) == 40


def test_a_ledger_that_breaks_off_leaves_the_earlier_file(run_dir: Path) -> None:
    path = run_dir / build.FILE_NAME
    timeline(run_dir)
    before = path.read_bytes()
    connection = sqlite3.connect(run_dir / "ledger.sqlite")
    connection.execute("UPDATE attempts SET engines = 'no JSON' WHERE attempt_id = 50")
    connection.commit()
    connection.close()
    with pytest.raises(LedgerError, match="cannot read this ledger: attempt 50: JSON is malformed"):
        write_timeline(Run(run_dir, "run"), path)
    assert path.read_bytes() == before
    assert {each.name for each in run_dir.iterdir() if "partial" in each.name} == set()


def test_lanes_are_used_again_once_they_are_free() -> None:
    lanes = Lanes()
    assert [lanes.place(*span) for span in [(0, 4), (1, 2), (2, 3), (2.5, 5), (4, 6), (4.5, 5)]] == [0, 1, 1, 2, 0, 1]
