"""Events in the logs of driver and rollout side (engines that came and went, outages, warnings, errors), and engines'
last pauses, from their report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime

from miles_async.runtime.json_texts import decoded_object
from miles_async.runtime.texts import shortened
from miles_async.types import JsonObject
from miles_async.watch.run import Run
from miles_async.watch.timeline.trace import Span, Track

LOGS = ("driver", "rollout")
MOST = 5_000  # items per log, the newest
LOG_BYTES = 1 << 26  # read of each log, from its end
SEVERE = frozenset({"warning", "error", "critical"})
ENGINE_EVENTS: Mapping[str, str] = {
    "engine is up": "serving",
    "restarting engine": "restarting",
    "engine given up": "given up",
    "draining engine": "draining",
    "engine is gone": "gone",
}
"""Message → state of its engine afterwards."""

OF_INTEREST = frozenset({*ENGINE_EVENTS, "publication waits", "engines repaired", "training begins", "resumed"})
TEXT_LENGTH = 500

ENDS_OF_OUTAGES = {"service is back": ("service", "after_seconds"), "in reach again": ("process", "seconds")}
"""Message → its fields with the name of the unreachable part, and the seconds."""


def notes(run: Run) -> Iterator[Span]:
    """Marks and outages in both logs."""
    for name in LOGS:
        found: deque[Span] = deque(maxlen=MOST)
        for entry in _entries(run, f"{name}.log"):
            if (item := _item(name, entry)) is not None:
                found.append(item)
        yield from found


def pauses(run: Run) -> Iterator[Span]:
    """The last pauses of each engine. One that has not ended lasts until the report was written."""
    report = run.engines()
    if report is None:
        return
    for engine, each in report.engines.items():
        for start, end in each.pauses:
            until = report.time if end is None else end
            yield Span(
                track=Track(engine, "paused"), name="paused", start=start, end=max(start, until), category="pause"
            )


def time_of(timestamp: object) -> float | None:
    """A line's timestamp in seconds since 1970; None if it has none."""
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except ValueError:
        return None


def _entries(run: Run, name: str) -> Iterator[JsonObject]:
    path = run.file("logs", name)
    if path is None:
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        for line in file:
            if line.startswith(b"{") and (entry := decoded_object(line)):
                yield entry


def _item(log: str, entry: JsonObject) -> Span | None:
    event, level, at = str(entry.get("event", "")), entry.get("level"), time_of(entry.get("timestamp"))
    if at is None or (level not in SEVERE and event not in OF_INTEREST and event not in ENDS_OF_OUTAGES):
        return None
    args = {
        name: shortened(str(value), TEXT_LENGTH) for name, value in entry.items() if name not in ("event", "timestamp")
    }
    if (fields := ENDS_OF_OUTAGES.get(event)) is not None:
        what, seconds = str(entry.get(fields[0], "")), entry.get(fields[1])
        if isinstance(seconds, int | float):
            track = Track("events", f"out of reach: {what}")
            return Span(track=track, name=what, start=at - seconds, end=at, category="outage", args=args)
    of_engine = event in ENGINE_EVENTS
    name = f"{entry['engine']}: {event}" if of_engine and "engine" in entry else shortened(event, TEXT_LENGTH)
    thread = "engines" if of_engine else log
    return Span(track=Track("events", thread), name=name, start=at, category=str(level), args=args)
