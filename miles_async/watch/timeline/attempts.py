"""The ledger: a span per engine that an attempt used, counts of groups, cuts, and settings that were changed."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from miles_async.ledger.reader import AttemptRecord, ChangeRecord, CutRecord
from miles_async.runtime.texts import shortened
from miles_async.watch.metrics_table import Series, down_sampled
from miles_async.watch.timeline.trace import Count, Item, Span, Track

Float64 = npt.NDArray[np.float64]

NO_ENGINE = "engine not known"
"""Process of attempts in flight, and of attempts that ended before any engine answered."""

CUTS = Track("pool", "cuts")
CHANGES = Track("events", "settings changed")
IN_FLIGHT = Track("pool", "groups in flight")
BUFFERED = Track("pool", "groups buffered")
NOTHING = Track("pool", "nothing in flight")
COUNTER_POINTS = 20_000  # of one counter; more are thinned
SHORTEST_GAP = 0.001  # seconds; a slot is free for less between one attempt and the next
REASON_LENGTH = 200


class Lanes:
    """Assigns tracks to overlapping spans: the lowest free number."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, int]] = []  # (end, lane)
        self._free: list[int] = []

    def place(self, start: float, end: float) -> int:
        """Take a lane from ``start`` to ``end``. Spans come in order of their start."""
        while self._busy and self._busy[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        lane = heapq.heappop(self._free) if self._free else len(self._busy)
        heapq.heappush(self._busy, (end, lane))
        return lane


class AttemptSpans:
    """Spans of attempts while they were generated and rewarded, and afterwards the counts that follow from them."""

    def __init__(self, since: float, until: float) -> None:
        """Counts begin at ``since``, when attempts may have been under way. ``until``: the last known moment, where
        attempts that are in flight end.
        """
        self._since = since
        self._until = until
        self._lanes: defaultdict[str, Lanes] = defaultdict(Lanes)
        self._in_flight: list[tuple[float, float]] = []
        self._buffered: list[tuple[float, float]] = []

    def spans(self, records: Iterable[AttemptRecord]) -> Iterator[Span]:
        """One span per attempt and engine. ``records``: in order of admission."""
        for record in records:
            end = self._generated_until(record)
            args = _arguments(record)
            for engine in record.engines or (NO_ENGINE,):
                lane = self._lanes[engine].place(record.issued_at, end)
                yield Span(
                    track=Track(engine, f"groups {lane}"),
                    name=f"attempt {record.attempt_id}",
                    start=record.issued_at,
                    end=end,
                    category=str(record.outcome or record.stage),
                    args=args,
                )

    def counts(self) -> Iterator[Item]:
        """Groups in flight and buffered over time, and when none was in flight, of all :meth:`spans`."""
        times, values = _running_count(self._in_flight, self._since)
        yield from _counter(IN_FLIGHT, times, values)
        yield from _counter(BUFFERED, *_running_count(self._buffered, self._since))
        for index in np.flatnonzero(values[:-1] == 0).tolist():
            start, end = float(times[index]), float(times[index + 1])
            if end - start >= SHORTEST_GAP:
                yield Span(track=NOTHING, name="nothing in flight", start=start, end=end, category="idle")

    def _generated_until(self, record: AttemptRecord) -> float:
        """Note the stages of an attempt; return when it was generated, or when it ended."""
        ended = self._until if record.ended_at is None else record.ended_at
        generated = ended if record.finished_at is None else record.finished_at
        self._in_flight.append((record.issued_at, generated))
        if record.finished_at is not None:
            self._buffered.append((record.finished_at, ended if record.cut_at is None else record.cut_at))
        return generated


def cuts(records: Iterable[CutRecord]) -> Iterator[Span]:
    """One mark per batch that was cut."""
    for record in records:
        args = {"version": record.target_version, "groups": record.groups, "oldest version": record.oldest_version}
        yield Span(track=CUTS, name=f"cut for version {record.target_version}", start=record.at, args=args)


def changes(records: Iterable[ChangeRecord]) -> Iterator[Span]:
    """One mark per setting that was changed, or request, while the run was live."""
    for record in records:
        args = {"after step": record.step, "before": record.before, "value": record.value}
        yield Span(track=CHANGES, name=record.change, start=record.at, category="setting", args=args)


def _arguments(record: AttemptRecord) -> dict[str, object]:
    known = {
        "prompt": record.prompt_id,
        "epoch": record.epoch,
        "engines": record.engines,
        "issued version": record.issued_version,
        "oldest version": record.oldest_version,
        "newest version": record.newest_version,
        "generation calls": record.chunks,
        "samples": None if record.response_lengths is None else len(record.response_lengths),
        "response tokens": None if record.response_lengths is None else sum(record.response_lengths),
        "reward": record.reward_mean,
        "cut for version": record.target_version,
        "step": record.step,
        "end": str(record.outcome or record.stage),
        "reason": None if record.reason is None else shortened(record.reason, REASON_LENGTH),
    }
    return {name: value for name, value in known.items() if value is not None}


def _running_count(intervals: Sequence[tuple[float, float]], since: float) -> tuple[Float64, Float64]:
    """(times, how many intervals there are from each time on), both [n], in order, times distinct, from ``since``."""
    pairs = np.array(intervals, dtype=np.float64).reshape(-1, 2).clip(min=since)
    pairs = pairs[pairs[:, 1] > pairs[:, 0]]
    times = np.concatenate([pairs[:, 0], pairs[:, 1]])
    changes = np.repeat([1.0, -1.0], len(pairs))
    order = np.argsort(times, kind="stable")
    times, counts = times[order], np.cumsum(changes[order])
    last = np.append(times[1:] != times[:-1], True) if len(times) else np.zeros(0, dtype=bool)
    return times[last], counts[last]


def _counter(track: Track, times: Float64, values: Float64) -> Iterator[Count]:
    if not len(times):
        return
    first = float(times[0])
    microseconds = np.round((times - first) * 1e6).astype(np.int64)
    thinned = down_sampled(Series(microseconds, values), COUNTER_POINTS)
    for at, value in zip(thinned.steps.tolist(), thinned.values.tolist(), strict=True):
        yield Count(track=track, start=first + at / 1e6, value=value)
