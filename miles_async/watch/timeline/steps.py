"""Steps, publications, checkpoints and evaluations: durations from ``metrics.jsonl``, set on the clock by the ledger.

A line of a step has its durations, and the time at which its publication was over. When the batch had been trained is
in the ledger, so a step began its training and the wait for its batch before that. Versions become visible just before
the first attempt under them is issued. Without a ledger, the time of the line is all there is, and a publication that
waited for an evaluation is shown where it ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from miles_async.observability.metrics_file import Kind, kind_of, row_of
from miles_async.watch.timeline.trace import Span, Track

STEPS = Track("trainer", "steps")
STEP = "step"
"""Category of the spans of whole steps."""

CHECKPOINTS = Track("trainer", "checkpoints")
PUBLICATIONS = Track("publications", "publications")
EVALUATIONS = Track("evaluations", "evaluations")
COPY = "copy weights"
DELIVERY = ("probe", "preparing", "pausing", "flush", "send", "compare", "resume", "canary", "admit")
"""Phases of a delivery, in order; with ``--publish-order rolling`` each is the sum over the engines."""

TURNS = "engines take turns"

SHOWN = ("reward/mean", "age/mean", "age/max", "train/tokens", "train/loss", "train/grad_norm")
"""Metrics among the facts of a step."""


@dataclass(frozen=True, slots=True)
class Line:
    kind: Kind
    step: int
    time: float
    values: Mapping[str, float]

    def seconds(self, name: str) -> float:
        """A duration; 0 if it was not measured."""
        return max(0.0, self.values.get(f"{name}_seconds", 0.0))

    @property
    def version(self) -> int | None:
        """Version that the step was trained from."""
        version = self.values.get("weight_version/trainer")
        return None if version is None else int(version)

    @property
    def publishes(self) -> bool:
        """True if the step's weights were published."""
        return "publish/copy_seconds" in self.values


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Times from the ledger, in seconds since 1970."""

    trained_at: Mapping[int, float] = field(default_factory=dict)  # by step: its batch had been trained
    visible_at: Mapping[int, float] = field(default_factory=dict)  # by version: the first attempt was issued under it


def line_of(text: bytes | str) -> Line | None:
    """One line of ``metrics.jsonl``; None if it is torn or has no time."""
    row = row_of(text)
    if row is None or not isinstance(time := row.get("time"), int | float):
        return None
    values = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    return Line(kind_of(row), row["step"], float(time), values)


def step_items(lines: Iterable[Line], clock: Clock, *, rolling: bool = False) -> Iterator[Span]:
    """All spans of the lines. Spans of a kind never overlap: clocks of two processes may differ by a little.

    ``rolling``: engines took turns in publications, so that their phases, which are sums, are one span.
    """
    step_end = published = evaluated = -math.inf
    recorded_at: dict[int, float] = {}
    first_visible = min(clock.visible_at.values(), default=None)  # when the evaluation before the first step began
    for line in lines:
        if line.kind == "step" and "time/step_seconds" in line.values:
            recorded_at[line.step] = line.time
            step = _step(line, clock, step_end)
            step_end = step[0].until
            yield from step
            if line.publishes:
                copy = step[-1].start if step[-1].name == COPY else step_end
                times = (max(copy, published), max(step_end, published))
                publication = _publication(line, clock, times, rolling=rolling)
                published = publication[0].until
                yield from publication
        elif line.kind == "checkpoint":
            yield from _checkpoint(line)
        elif line.kind == "evaluation":
            before = line.step < min(recorded_at, default=line.step + 1)
            start = first_visible if before else recorded_at.get(line.step)
            yield _evaluation(line, None if start is None else max(start, evaluated))
            evaluated = line.time


def _step(line: Line, clock: Clock, after: float) -> list[Span]:
    """The step, and its parts in order; the last one has what comes after training and waiting."""
    train, published = line.seconds("time/train"), line.seconds("time/publication_wait")
    wait, whole = max(0.0, line.seconds("time/wait") - published), line.seconds("time/step")
    trained = clock.trained_at.get(line.step)
    if trained is None:
        start = line.time - _delivery_seconds(line) - _staging_seconds(line) - whole
    else:
        start = trained - train - wait
    start = max(start, after)
    end = start + whole
    args: dict[str, object] = {name: line.values[name] for name in SHOWN if name in line.values}
    if (version := line.version) is not None:
        args["from version"] = version
    parts = [("wait for the batch", wait), ("train", train), ("wait for the publication", published)]
    parts.append((COPY if line.publishes else "other", whole))
    step = Span(track=STEPS, name=f"step {line.step}", start=start, end=end, category=STEP, args=args)
    return [step, *_laid(STEPS, "part of a step", parts, start, end)]


def _publication(line: Line, clock: Clock, copy: tuple[float, float], *, rolling: bool) -> list[Span]:
    """From the copy of the weights, whose start and end are known, until they were visible."""
    version = None if line.version is None else line.version + 1
    staging, delivery = _staging_seconds(line), _delivery_seconds(line)
    start, copied = copy
    visible = math.inf if version is None else clock.visible_at.get(version, math.inf)
    end = max(copied, min(line.time, max(visible, copied + staging + delivery)))
    args: dict[str, object] = {key: line.values[key] for key in sorted(line.values) if key.startswith("publish/")}
    args["step"] = line.step
    name = f"publication of step {line.step}" if version is None else f"version {version}"
    parts = [("copy", copied - start), ("stage", staging)]
    parts.append(("wait for an evaluation or engines", end - copied - staging - delivery))
    parts += [(TURNS, delivery)] if rolling else [(phase, line.seconds(f"publish/{phase}")) for phase in DELIVERY]
    whole = Span(track=PUBLICATIONS, name=name, start=start, end=end, category="publication", args=args)
    return [whole, *_laid(PUBLICATIONS, "publication", parts, start, end)]


def _laid(track: Track, category: str, parts: Iterable[tuple[str, float]], start: float, end: float) -> Iterator[Span]:
    """Spans of (name, seconds) one after the other, cut at ``end``, without empty ones."""
    for name, seconds in parts:
        if (stop := min(end, start + seconds)) > start:
            yield Span(track=track, name=name, start=start, end=stop, category=category)
            start = stop


def _delivery_seconds(line: Line) -> float:
    return sum(line.seconds(f"publish/{phase}") for phase in DELIVERY)


def _staging_seconds(line: Line) -> float:
    """``publish/prepare_seconds`` is from the export to the pause: without the copy and the delivery's share of it."""
    others = ("copy", "probe", "preparing")
    return max(0.0, line.seconds("publish/prepare") - sum(line.seconds(f"publish/{name}") for name in others))


def _checkpoint(line: Line) -> Iterator[Span]:
    blocked, write = line.seconds("checkpoint/blocked"), line.seconds("checkpoint/write")
    start, written = line.time - write - blocked, line.time - write
    name = f"checkpoint of step {line.step}"
    yield Span(track=CHECKPOINTS, name=name, start=start, end=line.time, category="checkpoint", args=line.values)
    yield Span(track=CHECKPOINTS, name="training waits", start=start, end=written, category="checkpoint")
    yield Span(track=CHECKPOINTS, name="write", start=written, end=line.time, category="checkpoint")


def _evaluation(line: Line, start: float | None) -> Span:
    args = {name: value for name, value in line.values.items() if name.startswith("eval/")}
    name = f"evaluation at step {line.step}"
    end = None if start is None else max(start, line.time)  # its step is not in this file
    start = line.time if start is None else start
    return Span(track=EVALUATIONS, name=name, start=start, end=end, category="evaluation", args=args)
