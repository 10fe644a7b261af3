"""Tables of samples for trackers that show them: what ``--save-samples`` wrote, without the lists per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from miles_async.runtime.texts import shortened
from miles_async.samples.columns import SampleSummary
from miles_async.samples.files import SamplesFile
from miles_async.samples.reader import read_summaries, samples_files

COLUMNS = (
    "prompt_id",
    "sample",
    "reward",
    "advantage",
    "finish_reason",
    "age",
    "length",
    "prompt",
    "response",
    "label",
)
"""Fields of SampleSummary, in the order of the table."""

MOST_ROWS = 64
MOST_CHARACTERS = 20_000  # of a cell; a longer one loses its middle

Cell = str | float | int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTable:
    """The samples of one step or evaluation."""

    name: str  # samples/train or samples/eval
    step: int
    rows: tuple[tuple[Cell, ...], ...]  # by COLUMNS


class SampleTables:
    """Tables that were not taken yet: of every ``every``-th step, and of all evaluations."""

    def __init__(self, run_dir: Path, every: int) -> None:
        self._run_dir = run_dir
        self._every = every
        self._taken: set[SamplesFile] = set()

    def new(self) -> Iterator[SampleTable]:
        """Yield the tables whose files are whole by now, each once. Raises DataError for one that cannot be read,
        which counts as taken.
        """
        for file in samples_files(self._run_dir):
            if file in self._taken or (file.kind == "train" and file.step % self._every):
                continue
            self._taken.add(file)
            rows = read_summaries(file.path)[:MOST_ROWS]
            yield SampleTable(name=f"samples/{file.kind}", step=file.step, rows=tuple(map(_row, rows)))


def _row(summary: SampleSummary) -> tuple[Cell, ...]:
    cells = (getattr(summary, column) for column in COLUMNS)
    return tuple(shortened(cell, MOST_CHARACTERS) if isinstance(cell, str) else cell for cell in cells)
