"""What trainer, ranks and engines did lately, as lanes: a letter per stretch of time, and the shares of the whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from miles_async.ledger.reader import AttemptRecord
from miles_async.observability.metrics_file import FILE_NAME
from miles_async.runtime.texts import last_lines
from miles_async.types import EnginesReport, JsonObject, RanksReport
from miles_async.watch.run import Run
from miles_async.watch.timeline.steps import COPY, DELIVERY, STEP, Clock, line_of, step_items
from miles_async.watch.timeline.trace import Span

STEPS = 20  # the last ones
TAIL_BYTES = 1 << 18  # of metrics.jsonl
COLUMNS = 300
IDLE = "."
KINDS: Mapping[str, str] = {
    "g": "generating",
    "u": "paused",
    "e": "evaluating",
    "f": "forward and backward",
    "l": "scoring",
    "a": "optimizer",
    "k": "packing",
    "r": "reducing gradients",
    "t": "training",
    "b": "waiting for the batch",
    "p": "waiting for the publication",
    "c": "copying weights",
    "s": "waiting for a checkpoint",
    "o": "other work",
    IDLE: "idle",
}
_TRAINER = {
    "wait for the batch": "b",
    "train": "t",
    "wait for the publication": "p",
    COPY: "c",
    "training waits": "s",
    "other": "o",
}
_PARTS = {KINDS[letter]: letter for letter in "flakr"}
_PAUSED = DELIVERY[DELIVERY.index("pausing") :]

Float64 = npt.NDArray[np.float64]
Intervals = list[tuple[float, float]]


def lanes(
    run: Run,
    engines: Sequence[str],
    records: Sequence[AttemptRecord],
    *,
    whole: bool,
    rolling: bool,
    reported: EnginesReport | None = None,
    ranks: RanksReport | None = None,
) -> JsonObject | None:
    """{"since", "until", "kinds": letter → words, "lanes": [{"name", "columns", "shares"}]}; None if nothing is known.

    ``engines``: names of all that the records name. ``records``: the newest attempts, newest first; ``whole``: there
    are no others. ``rolling``: engines got their weights one after the other, so that no phase is of all of them; then
    pauses are those in ``reported`` alone.
    """
    lines = [line for text in last_lines(run.directory / FILE_NAME, TAIL_BYTES) if (line := line_of(text)) is not None]
    spans = [item for item in step_items(lines, _clock(records, whole=whole)) if isinstance(item, Span)]
    steps = [span for span in spans if span.category == STEP][-STEPS:]
    until = max([*(span.end for span in steps), *map(_last, records)], default=0.0)
    begins = [span.start for span in steps[:1]]
    begins += [record.issued_at for record in records[-1:] if not (whole and steps)]
    since = max(begins, default=until)
    if until <= since:
        return None
    edges = np.linspace(since, until, COLUMNS + 1)
    trainer, everywhere = _of_spans(spans, rolling=rolling)
    generating: dict[str, Intervals] = {engine: [] for engine in engines}
    for record in records:
        for engine in record.engines or ():
            generating[engine].append((record.issued_at, record.finished_at or record.ended_at or until))
    of_trainer = _all_covered(trainer, edges)
    evaluating = _covered(everywhere["e"], edges)
    found = [_lane("trainer", of_trainer, edges)] if trainer else []
    for number, parts in enumerate(_of_ranks(ranks)):
        own = _all_covered(parts, edges)
        below = {kind: own.get(kind, 0.0) + seconds for kind, seconds in of_trainer.items()}
        found.append(_lane(f"rank {number}", own | below, edges))
    for name, intervals in generating.items():
        pauses = everywhere["u"]
        if reported is not None and (report := reported.engines.get(name)) is not None:
            pauses = [pause for pause in pauses if pause[0] > reported.time]
            pauses += [(began, reported.time if ended is None else ended) for began, ended in report.pauses]
        own = _all_covered({"u": pauses, "g": intervals}, edges)
        found.append(_lane(name, own | {"e": evaluating}, edges))
    return {"since": since, "until": until, "kinds": KINDS, "lanes": found}


def _clock(records: Sequence[AttemptRecord], *, whole: bool) -> Clock:
    trained_at: dict[int, float] = {}
    visible_at: dict[int, float] = {}
    for record in records:
        if record.step is not None and record.ended_at is not None:
            trained_at[record.step] = min(record.ended_at, trained_at.get(record.step, record.ended_at))
        visible_at[record.issued_version] = record.issued_at  # the oldest attempt comes last
    if records and not whole:
        del visible_at[min(visible_at)]  # attempts under it may be left out
    return Clock(trained_at=trained_at, visible_at=visible_at)


def _of_spans(
    spans: Iterable[Span], *, rolling: bool
) -> tuple[defaultdict[str, Intervals], defaultdict[str, Intervals]]:
    """By kind: what the trainer did, and what all engines did."""
    trainer: defaultdict[str, Intervals] = defaultdict(list)
    engines: defaultdict[str, Intervals] = defaultdict(list)
    for span in spans:
        lasted = (span.start, span.end)
        if span.track.process == "trainer" and span.name in _TRAINER:
            trainer[_TRAINER[span.name]].append(lasted)
        elif span.category == "publication" and span.name in _PAUSED and not rolling:
            engines["u"].append(lasted)
        elif span.category == "evaluation":
            engines["e"].append(lasted)
    return trainer, engines


def _of_ranks(report: RanksReport | None) -> Iterator[Mapping[str, Intervals]]:
    """What each rank did, by kind: the parts of each step one after the other."""
    for steps in zip(*report.steps, strict=False) if report is not None else ():
        found: defaultdict[str, Intervals] = defaultdict(list)
        for step in steps:
            at = step.began
            for part, seconds in step.seconds.items():
                found[_PARTS.get(part, "t")].append((at, at + seconds))
                at += seconds
        yield found


def _lane(name: str, covered: Mapping[str, Float64], edges: Float64) -> JsonObject:
    """``covered``: seconds of each stretch by kind. Kinds that come first cover those that follow."""
    left, rows = np.diff(edges), {}
    for kind, seconds in covered.items():
        rows[kind] = np.minimum(seconds, left)
        left = left - rows[kind]
    rows[IDLE] = left
    stacked = np.array([*rows.values()])
    shares = dict(zip(rows, (stacked.sum(1) / (edges[-1] - edges[0])).round(4).tolist(), strict=True))
    return {
        "name": name,
        "columns": np.frombuffer("".join(rows).encode(), np.uint8)[stacked.argmax(0)].tobytes().decode(),
        "shares": {kind: share for kind, share in shares.items() if share or kind == IDLE},
    }


def _all_covered(intervals: Mapping[str, Intervals], edges: Float64) -> dict[str, Float64]:
    return {kind: _covered(each, edges) for kind, each in intervals.items()}


def _covered(intervals: Intervals, edges: Float64) -> Float64:
    """Seconds of each stretch between ``edges`` that at least one interval covers."""
    if not intervals:
        return np.zeros(len(edges) - 1)
    pairs = np.array(sorted(intervals))
    ends = np.maximum.accumulate(pairs[:, 1])
    first, last = np.ones((2, len(pairs)), dtype=bool)  # of intervals that overlap
    first[1:] = last[:-1] = pairs[1:, 0] > ends[:-1]
    starts, stops = pairs[first, 0], ends[last]
    done = np.cumsum(stops - starts)
    until = np.interp(edges, _alternating(starts, stops), _alternating(done - (stops - starts), done))
    covered: Float64 = until[1:] - until[:-1]
    return covered


def _alternating(evens: Float64, odds: Float64) -> Float64:
    return np.array([evens, odds]).ravel("F")


def _last(record: AttemptRecord) -> float:
    return max(record.issued_at, record.finished_at or 0.0, record.ended_at or 0.0)
