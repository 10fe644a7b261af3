"""Timelines for tests: read as Chrome's trace event format has them, and checked against it."""

from __future__ import annotations

import gzip
import sqlite3
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

RECORDED = Path(__file__).parent / "recorded_run"
"""Six steps of the quick start, as a kill left them: two attempts are in flight. Its ledger is a dump in SQL."""

MICROSECOND = 1e-6


class Event(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="ph"):
    name: str
    pid: int
    tid: int
    ts: int
    args: dict[str, msgspec.Raw] = {}


class Span(Event, tag="X"):
    dur: int
    cat: str = ""

    @property
    def end(self) -> int:
        return self.ts + self.dur


class Instant(Event, tag="i"):
    s: Literal["g", "p", "t"]
    cat: str = ""


class Value(msgspec.Struct, forbid_unknown_fields=True):
    value: float


class Count(Event, tag="C"):
    pass


class Metadata(Event, tag="M"):
    pass


class Trace(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON object form of the format."""

    displayTimeUnit: Literal["ms", "ns"]
    otherData: dict[str, str]
    traceEvents: list[Span | Instant | Count | Metadata]

    def tracks(self) -> dict[tuple[str, str], list[Span | Instant | Count]]:
        """Events by (process, thread)."""
        names = {(event.name, event.pid, event.tid): text(event, "name") for event in self._metadata("_name")}
        found: defaultdict[tuple[str, str], list[Span | Instant | Count]] = defaultdict(list)
        for event in self.traceEvents:
            if not isinstance(event, Metadata):
                process, thread = names["process_name", event.pid, 0], names["thread_name", event.pid, event.tid]
                found[process, thread].append(event)
        return dict(found)

    def spans(self, process: str, thread: str = "", category: str = "") -> list[Span]:
        """Spans of the tracks whose names begin so."""
        return [
            event
            for (name, row), events in self.tracks().items()
            if name == process and row.startswith(thread)
            for event in events
            if isinstance(event, Span) and category in ("", event.cat)
        ]

    def _metadata(self, ending: str) -> list[Metadata]:
        return [e for e in self.traceEvents if isinstance(e, Metadata) and e.name.endswith(ending)]


def text(event: Event, name: str) -> str:
    return msgspec.json.decode(event.args[name], type=str)


def number(event: Event, name: str) -> float:
    return msgspec.json.decode(event.args[name], type=float)


def check_trace(content: bytes) -> Trace:
    """Decode a trace and check what the format asks for: known fields, times, names of all tracks, nesting."""
    trace = msgspec.json.decode(content, type=Trace)
    for (process, thread), events in trace.tracks().items():  # a KeyError: a track without a name
        assert all(event.ts >= 0 for event in events), (process, thread)
        open_spans: list[Span] = []
        spans = [event for event in events if isinstance(event, Span)]
        for span in sorted(spans, key=lambda span: span.ts):
            assert span.dur >= 0
            while open_spans and open_spans[-1].end <= span.ts:
                open_spans.pop()
            assert not open_spans or span.end <= open_spans[-1].end, (process, thread, open_spans[-1], span)
            open_spans.append(span)
        for event in events:
            if isinstance(event, Count):
                msgspec.convert({name: msgspec.json.decode(raw) for name, raw in event.args.items()}, Value)
    return trace


def read_trace(path: Path) -> Trace:
    return check_trace(gzip.decompress(path.read_bytes()))


def recorded_run(directory: Path) -> Path:
    """A copy of the recorded run, with its ledger as a database."""
    (directory / "logs").mkdir(parents=True)
    for name in ("metrics.jsonl", "logs/driver.log", "logs/rollout.log"):
        (directory / name).write_bytes((RECORDED / name).read_bytes())
    connection = sqlite3.connect(directory / "ledger.sqlite")
    connection.executescript((RECORDED / "ledger.sql").read_text())
    connection.close()
    return directory


def seconds_by_name(spans: list[Span]) -> Mapping[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        found[span.name] += span.dur * MICROSECOND
    return found
