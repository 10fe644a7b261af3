"""Recent activity of trainer, ranks and engines, as lanes: a letter per stretch of time, and shares of the whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

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
TRAIN, EVALUATION = "train", "evaluation"  # roles of engines
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

STRIDE = COLUMNS + 2
"""Columns from one lane to the next where lanes stand in one row: no interval reaches the next one."""


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
    pauses are those in ``reported`` alone. Evaluations are drawn on the engines that ``reported`` says are for them.
    """
    lines = [line for text in last_lines(run.directory / FILE_NAME, TAIL_BYTES) if (line := line_of(text)) is not None]
    spans = [span for span in step_items(lines, _clock(records, whole=whole)) if span.end is not None]
    steps = [span for span in spans if span.category == STEP][-STEPS:]
    until = max([*(span.until for span in steps), *map(_last, records)], default=0.0)
    begins = [span.start for span in steps[:1]]
    begins += [record.issued_at for record in records[-1:] if not (whole and steps)]
    since = max(begins, default=until)
    if until <= since:
        return None
    edges = np.linspace(since, until, COLUMNS + 1)
    trainer, everywhere = _of_spans(spans, rolling=rolling)
    of_trainer = {kind: _covered([intervals], edges) for kind, intervals in trainer.items()}
    found = _lanes(["trainer"], of_trainer, edges) if trainer else []
    if ranks is not None and (number := min(map(len, ranks.steps), default=0)):
        own = _of_ranks(ranks, number, edges)
        below = {kind: own.get(kind, 0.0) + seconds for kind, seconds in of_trainer.items()}
        found += _lanes([f"rank {rank}" for rank in range(number)], own | below, edges)
    if engines:
        of_engines = _of_engines(engines, records, everywhere, reported, edges)
        found += _lanes(engines, of_engines, edges)
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
    """Activity of the trainer and of all engines, by kind."""
    trainer: defaultdict[str, Intervals] = defaultdict(list)
    engines: defaultdict[str, Intervals] = defaultdict(list)
    for span in spans:
        lasted = (span.start, span.until)
        if span.track.process == "trainer" and span.name in _TRAINER:
            trainer[_TRAINER[span.name]].append(lasted)
        elif span.category == "publication" and span.name in _PAUSED and not rolling:
            engines["u"].append(lasted)
        elif span.category == "evaluation":
            engines["e"].append(lasted)
    return trainer, engines


def _of_ranks(report: RanksReport, number: int, edges: Float64) -> dict[str, Float64]:
    """Activity of each rank, by kind: the parts of each step in sequence."""
    steps = [step[:number] for step in report.steps]
    orders = dict.fromkeys(tuple(times.seconds) for step in steps for times in step)
    parts = [*dict.fromkeys(part for order in orders for part in order)]
    rows = [[[*map(times.seconds.get, parts)] for times in step] for step in steps]
    seconds = np.nan_to_num(np.array(rows, dtype=np.float64))  # None where a rank has no such part
    ends = seconds.cumsum(2) + np.array([[[times.began] for times in step] for step in steps])
    intervals = np.stack([ends - seconds, ends], 3)  # [steps, ranks, parts, 2]
    kinds = [_PARTS.get(part, "t") for part in parts]
    found = {}
    for kind in dict.fromkeys(kinds):
        chosen = intervals[:, :, [each == kind for each in kinds]].swapaxes(1, 2)
        lane = np.broadcast_to(np.arange(number), chosen.shape[:3])
        found[kind] = _covered_rows(lane.ravel(), chosen.reshape(-1, 2), number, edges)
    return found


def _of_engines(
    engines: Sequence[str],
    records: Iterable[AttemptRecord],
    everywhere: Mapping[str, Intervals],
    reported: EnginesReport | None,
    edges: Float64,
) -> dict[str, Float64]:
    """Activity of each engine, by kind. ``everywhere``: pauses and evaluations of all engines that get publications."""
    generating: dict[str, Intervals] = {engine: [] for engine in engines}
    for record in records:
        for engine in record.engines or ():
            generating[engine].append((record.issued_at, record.finished_at or record.ended_at or float(edges[-1])))
    reports = {} if reported is None else reported.engines
    pauses: list[Intervals] = []
    for engine in engines:
        if reported is None or (report := reports.get(engine)) is None:
            pauses.append(everywhere["u"])
            continue
        later = [pause for pause in everywhere["u"] if pause[0] > reported.time] if report.role == TRAIN else []
        pauses.append([(began, reported.time if ended is None else ended) for began, ended in report.pauses] + later)
    apart = {engine for engine, report in reports.items() if report.role == EVALUATION}
    evaluating = [
        engine in apart if apart else engine not in reports or reports[engine].role == TRAIN for engine in engines
    ]
    return {
        "u": _covered(pauses, edges),
        "g": _covered([*generating.values()], edges),
        "e": np.array(evaluating)[:, None] * _covered([everywhere["e"]], edges),
    }


def _lanes(names: Sequence[str], covered: Mapping[str, Float64], edges: Float64) -> list[JsonObject]:
    """A lane per name. ``covered``: seconds of each stretch, [lanes, COLUMNS] or [1, COLUMNS] for all lanes alike, by
    kind. Earlier kinds cover later ones.
    """
    left = np.tile(np.diff(edges), (len(names), 1))
    most, letters = np.zeros_like(left), np.full(left.shape, ord(IDLE), np.uint8)
    shares = {}
    for kind, seconds in covered.items():
        own = np.minimum(seconds, left)
        left -= own
        more = own > most
        most, letters[more] = np.maximum(own, most), ord(kind)
        shares[kind] = own.sum(1)
    letters[left > most] = ord(IDLE)
    shares[IDLE] = left.sum(1)
    rounded = [(each / (edges[-1] - edges[0])).round(4).tolist() for each in shares.values()]
    return [
        {
            "name": name,
            "columns": columns.tobytes().decode(),
            "shares": {kind: share for kind, share in zip(shares, each, strict=True) if share or kind == IDLE},
        }
        for name, columns, each in zip(names, letters, zip(*rounded, strict=True), strict=True)
    ]


def _covered(intervals: Sequence[Intervals], edges: Float64) -> Float64:
    """Seconds of each stretch between ``edges`` that at least one interval covers: [lanes, COLUMNS]."""
    rows = np.repeat(np.arange(len(intervals)), [len(each) for each in intervals])
    pairs = np.array([pair for each in intervals for pair in each], dtype=np.float64).reshape(-1, 2)
    return _covered_rows(rows, pairs, len(intervals), edges)


def _covered_rows(rows: npt.NDArray[np.int64], pairs: Float64, count: int, edges: Float64) -> Float64:
    """:func:`_covered` of intervals ``pairs`` [n, 2] that are of lanes ``rows`` [n] among ``count``."""
    width = (edges[-1] - edges[0]) / COLUMNS
    begins, ends = ((pairs - edges[0]) / width).clip(0, COLUMNS).T + rows * STRIDE
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    begins[1:] = np.maximum(begins[1:], ends[:-1])  # time covered by earlier ones counts once
    covered = _after(begins, count * STRIDE) - _after(ends, count * STRIDE)
    seconds: Float64 = covered.cumsum().reshape(count, STRIDE)[:, :COLUMNS].clip(0, 1) * width
    return seconds


def _after(moments: Float64, size: int) -> Float64:
    """Contribution of each moment, in columns, to the covered share of its column and the next; sums to 1."""
    columns = moments.astype(np.int64)
    share = moments - columns
    added = np.zeros(size)
    added += np.bincount(columns, 1 - share, size)
    added += np.bincount(columns + 1, share, size)
    return added


def _last(record: AttemptRecord) -> float:
    return max(record.issued_at, record.finished_at or 0.0, record.ended_at or 0.0)
