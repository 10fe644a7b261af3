"""Choose and order samples of a run by their columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

import msgspec

from miles_async.errors import DataError
from miles_async.samples.columns import Kind, SampleSummary
from miles_async.samples.reader import read_summaries, samples_files

Order = Literal["reward", "length", "age", "advantage", "step"]
"""A column to order by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Conditions that all have to hold; None and () for any."""

    kind: Kind | None = None
    steps: Sequence[int] = ()
    group: int | None = None  # attempt id
    prompt_id: str | None = None
    data_set: str | None = None
    reward: tuple[float, float] | None = None  # from, to
    length: tuple[float, float] | None = None
    age: tuple[float, float] | None = None
    finish_reason: str | None = None
    filtered: bool | None = None
    text: str | None = None  # in prompt, response or conversation; upper and lower case are the same

    def matches(self, row: SampleSummary) -> bool:
        """Return whether a row meets all conditions; a value that is absent meets none."""
        wanted = (
            (self.group, row.attempt_id),
            (self.prompt_id, row.prompt_id),
            (self.data_set, row.data_set),
            (self.finish_reason, row.finish_reason),
        )
        return (
            all(value is None or value == found for value, found in wanted)
            and (self.filtered is None or self.filtered == (row.filtered is not None))
            and _within(self.reward, row.reward)
            and _within(self.length, row.length)
            and _within(self.age, row.age)
            and self._has_text(row)
        )

    def _has_text(self, row: SampleSummary) -> bool:
        if self.text is None:
            return True
        texts = ((self.text, row.prompt), (self.text, row.response), (in_messages(self.text), row.messages or ""))
        return any(wanted.casefold() in text.casefold() for wanted, text in texts)


def in_messages(text: str) -> str:
    """Return a text as the JSON of ``SampleSummary.messages`` has it, with quotes and line ends escaped."""
    return msgspec.json.encode(text).decode()[1:-1]


def find(
    run_dir: Path,
    query: Query,
    unreadable: Callable[[DataError], None],
    read: Callable[[Path], Sequence[SampleSummary]] = read_summaries,
) -> Iterator[SampleSummary]:
    """Yield the rows that match, by step. ``unreadable``: called for files that cannot be read, or are gone by then.

    ``read``: reads the rows of a file.
    """
    for file in samples_files(run_dir):
        if (query.kind is None or query.kind == file.kind) and (not query.steps or file.step in query.steps):
            try:
                rows = read(file.path)
            except DataError as error:
                unreadable(error)
                continue
            yield from filter(query.matches, rows)


def ordered(rows: Sequence[SampleSummary], order: Order, *, reverse: bool) -> list[SampleSummary]:
    """Order rows, the largest first unless ``reverse``; rows without a value come last."""
    value: Callable[[SampleSummary], float | None] = attrgetter(order)
    known = [(number, row) for row in rows if (number := value(row)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=not reverse)
    return [*(row for _, row in known), *(row for row in rows if value(row) is None)]


def _within(bounds: tuple[float, float] | None, value: float | None) -> bool:
    return bounds is None or (value is not None and bounds[0] <= value <= bounds[1])
