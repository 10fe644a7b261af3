"""Write the timeline of a run directory to a file: the part of the run that it covers, and facts about it."""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from miles_async.errors import LedgerError
from miles_async.ledger.reader import LedgerReader
from miles_async.observability.metrics_file import FILE_NAME as METRICS_FILE
from miles_async.watch.run import Run
from miles_async.watch.timeline.attempts import AttemptSpans, changes, cuts
from miles_async.watch.timeline.notes import notes, pauses
from miles_async.watch.timeline.requests import requests
from miles_async.watch.timeline.steps import STEP, Clock, Line, line_of, step_items
from miles_async.watch.timeline.trace import Item, Span, TraceEncoder, trace_text

PROCESSES = ("trainer", "publications", "evaluations", "pool", "events")
"""Shown above the engines."""

FILE_NAME = "timeline.json.gz"
MOST_ATTEMPTS = 100_000
MOST_LINES = 10_000  # of metrics.jsonl, the newest


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The part of a run that a timeline has: the newest attempts, and no more than the newest steps."""

    attempts: int = MOST_ATTEMPTS
    last_steps: int | None = None  # None: all steps


def write_timeline(run: Run, path: Path, part: Part = Part()) -> int:
    """Write the timeline and return its size in bytes. Raises OSError, and LedgerError if the ledger breaks off."""
    unfinished = path.with_name(path.name + ".partial")
    try:
        with unfinished.open("wb") as file:
            for chunk in compressed(trace(run, part)):
                file.write(chunk)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path.stat().st_size


def compressed(parts: Iterable[bytes]) -> Iterator[bytes]:
    """``parts`` as one gzip file with one member: not every viewer reads on after the first."""
    compressor = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    for part in parts:
        if chunk := compressor.compress(part):
            yield chunk
    yield compressor.flush()


def trace(run: Run, part: Part = Part()) -> Iterator[bytes]:
    """The trace as JSON, in parts. Raises OSError and LedgerError as :func:`write_timeline` does."""
    about = {
        "run": run.name,
        "made from": "ledger.sqlite, metrics.jsonl, engines.json, samples/ and logs/ of the run directory",
    }
    with ExitStack() as stack:
        reader = None
        try:
            reader = stack.enter_context(run.ledger())
        except LedgerError as error:
            about["ledger"] = f"could not be read: {error}"
        items, since = _without_attempts(run, reader, part, about)
        attempts: Iterator[Item] = iter(())
        if reader is not None:
            attempts = _attempts(reader, part, since, until=max(reader.last_at(), *(item.until for item in items), 0.0))
            about |= _about_attempts(reader, part)
        first = [*itertools.islice(attempts, 1)]
        origin = min((item.start for item in (*items, *first)), default=0.0)
        about["time 0"] = f"{origin:.6f} seconds since 1970"
        yield from trace_text(TraceEncoder(origin, PROCESSES).events(itertools.chain(items, first, attempts)), about)


def _without_attempts(
    run: Run, reader: LedgerReader | None, part: Part, about: dict[str, str]
) -> tuple[list[Span], float]:
    """All other items, and the time since which they are wanted. Adds notes on omissions to ``about``."""
    lines, left_out = _newest_lines(run)
    clock = Clock()
    if reader is not None:
        clock = Clock(trained_at=reader.trained_at(), visible_at=reader.first_issued_at())
    rolling = run.flags().get("weights", {}).get("publish-order") == "rolling"
    items = [*step_items(lines, clock, rolling=rolling)]
    steps = [item for item in items if item.category == STEP]
    wanted = len(steps) if part.last_steps is None else min(part.last_steps, len(steps))
    since = 0.0
    if left_out or wanted < len(steps):
        since = steps[-wanted].start if wanted else 0.0
        about["steps"] = f"the newest {wanted}; earlier ones are left out"
    items += notes(run)
    items += [*requests(run), *pauses(run)]
    if reader is not None:
        items += [*cuts(reader.cuts()), *changes(reader.changes())]
    return [item for item in items if item.until > since or item.start == since], since


def _newest_lines(run: Run) -> tuple[list[Line], int]:
    """The newest lines of the metrics file, and how many older ones it has."""
    path = run.file(METRICS_FILE)
    if path is None:
        return [], 0
    newest: deque[Line] = deque(maxlen=MOST_LINES)
    count = 0
    with path.open("rb") as file:
        for line in filter(None, map(line_of, file)):
            newest.append(line)
            count += 1
    return [*newest], count - len(newest)


def _attempts(reader: LedgerReader, part: Part, since: float, *, until: float) -> Iterator[Item]:
    """First the item that starts first."""
    since = max(since, reader.newest_issued_at(part.attempts))
    spans = AttemptSpans(since, until)
    yield from spans.spans(reader.alive_since(since))
    yield from spans.counts()


def _about_attempts(reader: LedgerReader, part: Part) -> dict[str, str]:
    bounds = reader.attempt_range()
    if bounds is None or (left_out := bounds[1] - bounds[0] + 1 - part.attempts) <= 0:
        return {}
    return {"attempts": f"the newest {part.attempts}; {left_out} that were issued before are left out"}
