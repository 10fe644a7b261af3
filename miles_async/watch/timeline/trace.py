"""Chrome's trace event format, as Perfetto reads it: spans, moments and counts on named tracks.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

Arguments = Mapping[str, object]
"""Facts that a viewer shows of a clicked event, as JSON values."""


class Track(NamedTuple):
    """A row of the viewer. Rows of a process stand together, in order of their first event."""

    process: str
    thread: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that lasted or, without an ``end``, happened at one moment. Those of one track that lasted are apart,
    or one contains the other and comes first.
    """

    track: Track
    name: str
    start: float  # seconds since 1970, as all times
    end: float | None = None
    category: str = ""
    args: Arguments = field(default_factory=dict)

    @property
    def until(self) -> float:
        """Its end, or the moment."""
        return self.start if self.end is None else self.end


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """The value of a counter from ``start`` on. Each thread of ``track`` is one counter."""

    track: Track
    start: float
    value: float


Item = Span | Count
Event = Mapping[str, object]
"""One entry of ``traceEvents``."""


class TraceEncoder:
    """Turns items into entries of ``traceEvents``."""

    def __init__(self, origin: float, first: Sequence[str]) -> None:
        """Times are counted from ``origin``, in seconds since 1970. ``first``: processes that stand above the others,
        which follow in order of their first event.
        """
        self._origin = origin
        self._ranks = {name: rank for rank, name in enumerate(first)}
        self._processes: dict[str, int] = {}
        self._threads: dict[Track, int] = {}

    def events(self, items: Iterable[Item]) -> Iterator[Event]:
        """The entries of each item; the first item of a process or track brings along its name."""
        for item in items:
            yield from self._names(item.track)
            start = self._microseconds(item.start)
            place = {"pid": self._processes[item.track.process], "tid": self._threads[item.track], "ts": start}
            if isinstance(item, Count):
                yield {"ph": "C", "name": item.track.thread, **place, "args": {"value": item.value}}
                continue
            about = {"name": item.name, **place, "cat": item.category, "args": item.args}
            if item.end is None:
                yield {"ph": "i", **about, "s": "t"}  # its mark is as high as its track
            else:
                yield {"ph": "X", **about, "dur": max(0, self._microseconds(item.end) - start)}

    def _names(self, track: Track) -> Iterator[Event]:
        if track in self._threads:
            return
        if track.process not in self._processes:
            pid = self._processes[track.process] = len(self._processes) + 1
            rank = self._ranks.get(track.process, len(self._ranks) + pid)
            yield _metadata("process_name", pid, 0, {"name": track.process})
            yield _metadata("process_sort_index", pid, 0, {"sort_index": rank})
        pid, tid = self._processes[track.process], len(self._threads) + 1
        self._threads[track] = tid
        yield _metadata("thread_name", pid, tid, {"name": track.thread})
        yield _metadata("thread_sort_index", pid, tid, {"sort_index": tid})

    def _microseconds(self, at: float) -> int:
        return round((at - self._origin) * 1e6)


def _metadata(name: str, pid: int, tid: int, args: Arguments) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def trace_text(events: Iterable[Event], about: Mapping[str, str]) -> Iterator[bytes]:
    """The file in parts: one JSON object, one line per event. ``about``: shown by viewers as facts of the trace."""
    encode = msgspec.json.Encoder().encode
    yield b'{"displayTimeUnit":"ms","otherData":' + encode(about) + b',"traceEvents":[\n'
    separator = b""
    for event in events:
        yield separator + encode(event)
        separator = b",\n"
    yield b"\n]}\n"
