"""Requests of the samples on disk: each turn of a sample with its engine, its start and how long it took.

The ledger knows groups; which engine had which request at what time is noted with a sample, and ``--save-samples`` says
of how many groups per step. So these tracks show a share of all requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from miles_async.runtime.json_texts import decoded_object
from miles_async.samples.columns import Turn
from miles_async.samples.files import SamplesFile
from miles_async.watch.run import Run
from miles_async.watch.sample_files import files_of
from miles_async.watch.timeline.attempts import NO_ENGINE, Lanes
from miles_async.watch.timeline.trace import Span, Track

MOST_FILES = 500  # of all kinds, of the newest steps
MOST_REQUESTS = 50_000  # the newest
_COLUMNS = ("kind", "step", "attempt_id", "sample", "branch", "turns", "metadata")


def requests(run: Run) -> Iterator[Span]:
    """Spans of requests on the engine where each began."""
    newest: list[SamplesFile] = sorted(files_of(run.directory), key=lambda file: file.step, reverse=True)
    found: list[Span] = []
    for file in newest[:MOST_FILES]:
        if len(found) < MOST_REQUESTS:
            found += _requests(file.path)
    lanes: defaultdict[str, Lanes] = defaultdict(Lanes)
    for span in sorted(found, key=lambda span: (span.start, span.until))[-MOST_REQUESTS:]:
        engine = span.track.process
        lane = lanes[engine].place(span.start, span.until)
        yield replace(span, track=Track(engine, f"requests of saved samples {lane}"))


def _requests(path: Path) -> Iterator[Span]:
    """The timed requests of a file, not in lanes yet; none if it is gone or cannot be read."""
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path, columns=list(_COLUMNS)).to_pylist()
        turns = msgspec.convert([row["turns"] or () for row in rows], list[list[Turn]])
    except (OSError, ValueError, KeyError, arrow.ArrowException, msgspec.ValidationError):
        return
    for row, of_row in zip(rows, turns, strict=True):
        noted = decoded_object(row["metadata"] or "{}").get("engines")
        engines = tuple(map(str, noted)) if isinstance(noted, list) and noted else (NO_ENGINE,)
        sample = f"attempt {row['attempt_id']} sample {row['sample']}"
        for number, turn in enumerate(of_row, 1):
            if turn.started_at is not None and turn.seconds is not None:
                yield Span(
                    track=Track(engines[0], ""),
                    name=f"{sample}, turn {number}" if number > 1 else sample,
                    start=turn.started_at,
                    end=turn.started_at + turn.seconds,
                    category=f"{row['kind']} request",
                    args={
                        "sample": sample,
                        "turn": number,
                        "tokens": turn.end - turn.start,
                        "kind": row["kind"],
                        "step": row["step"],
                        "engines": engines,  # several: it was interrupted, and continued elsewhere
                    },
                )
