"""The samples of one evaluation: written in parts as they come, so that memory doesn't grow with the data sets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from miles_async.samples.columns import FileNote, SampleRow
from miles_async.samples.parquet_writer import FileWriter
from miles_async.samples.rows import Place, TokenTexts, rows_of
from miles_async.samples.store import SampleStore
from miles_async.staleness.versions import group_of
from miles_async.types import Attempt, Sample

PART = 64
"""Samples of a part; a part is a row group of the file."""

_Evaluated = tuple[str, Attempt, int, Sample, int]


class Queue(Protocol):
    """Does work in the recorder's thread; False if it is dropped."""

    def __call__(self, work: Callable[[], None], *, always: bool = False) -> bool: ...


class EvaluationSamples:
    """Collects the samples of an evaluation. The file is there after :meth:`close`."""

    def __init__(self, store: SampleStore, texts: TokenTexts, queue: Queue, *, step: int) -> None:
        """``queue``: ``SampleRecorder.queue``."""
        self._store = store
        self._texts = texts
        self._queue = queue
        self._step = step
        self._waiting: list[_Evaluated] = []
        self._prompts: set[int] = set()  # attempts
        self._asked: Counter[str] = Counter()  # samples, by data set
        self._dropped = 0  # samples for which the disk was too slow
        # In the thread:
        self._file: FileWriter | None = None
        self._written: set[int] = set()
        self._skipped = False
        self._failed = 0  # samples that cannot be written

    def ask(self, data_set: str, samples: int) -> None:
        """Note that a prompt gets so many samples, of which some may fail."""
        self._asked[data_set] += samples

    def add(self, data_set: str, attempt: Attempt, index: int, sample: Sample, *, samples: int) -> None:
        """Queue a rewarded sample, number ``index`` of the ``samples`` of its prompt."""
        self._prompts.add(attempt.attempt_id)
        self._waiting.append((data_set, attempt, index, sample, samples))
        if len(self._waiting) >= PART:
            self._flush()

    def close(self, *, complete: bool) -> None:
        """Complete the file. ``complete``: the evaluation went to its end."""
        self._flush()
        prompts, dropped, asked = len(self._prompts), self._dropped, dict(self._asked)
        self._queue(lambda: self._end(prompts, dropped, asked, complete), always=True)  # without it there is no file

    def _flush(self) -> None:
        part, self._waiting = self._waiting, []
        if part and not self._queue(lambda: self._write(part)):
            self._dropped += len(part)

    # ------------------------------------------------------------------------------------------------- in the thread
    def _write(self, part: Sequence[_Evaluated]) -> None:
        if self._file is None and not self._skipped:
            if self._store.wants("eval", self._step):
                self._file = self._store.open("eval", self._step)
            else:
                self._skipped = True
        if self._file is None or self._skipped:
            return
        self._failed += len(part)
        rows: list[SampleRow] = []
        for data_set, attempt, index, sample, samples in part:
            place = Place(kind="eval", step=self._step, data_set=data_set, written_at=time.time())
            group = group_of(attempt, [sample])
            rows += rows_of(group, place, self._texts, first=index, samples=samples)
        self._file.add(rows)
        self._failed -= len(part)
        self._written.update(attempt.attempt_id for _, attempt, *_ in part)
        self._skipped = self._file.size() > self._store.largest_file

    def _end(self, prompts: int, dropped: int, asked: dict[str, int], complete: bool) -> None:
        if self._file is None and asked and not prompts and complete:  # all have failed, which the file says
            self._file = self._store.open("eval", self._step)
        if self._file is None:
            return
        fewer = "the evaluation was interrupted" if not complete else None
        if lost := dropped + self._failed:
            fewer = f"{lost} samples were not written: the disk was too slow, or they have no form in the file"
        elif len(self._written) < prompts:
            fewer = f"an evaluation gets at most {self._store.largest_file / 2**30:.3g} GiB of --save-samples-gib"
        note = FileNote(
            kind="eval",
            step=self._step,
            groups=prompts,
            groups_written=len(self._written),
            why_fewer=fewer,
            asked=asked,
        )
        file, self._file = self._file, None
        self._store.complete(file, note)
