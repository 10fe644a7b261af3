"""Record samples of a run in a thread of their own, behind a bounded queue.

Samples never block or end training: :meth:`SampleRecorder.batch` and the like only queue references; a full queue drops
and counts; a disk that is full or gone is one warning, after which nothing more is written.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import structlog

from miles_async.samples.columns import FileNote, SampleRow
from miles_async.samples.evaluation import EvaluationSamples
from miles_async.samples.rows import Decode, Place, TokenTexts, rows_of, without_sampling
from miles_async.samples.store import SampleStore
from miles_async.staleness.events import Ended, Finished, PoolEvent
from miles_async.staleness.ledger import Outcome
from miles_async.train_data.batch import BranchTable, token_advantages
from miles_async.types import Float32, Group

log = structlog.get_logger(__name__)

Work = Callable[[], None]

CAPACITY = 64  # batches, and parts of evaluations, that may wait
FINISH_SECONDS = 10.0


class SampleRecorder:
    """Writes ``groups`` groups of each batch, as many filtered ones, and evaluations."""

    def __init__(
        self,
        directory: Path,
        *,
        groups: int,
        limit_bytes: int,
        decode: Decode,
        sampled: bool = True,
        only_file: bool = False,
    ) -> None:
        """``directory``: made with the first file. ``decode``: called in the thread, on single tokens too. ``sampled``:
        batches are of samples, and not of examples without rewards, versions and advantages. ``only_file``: one file
        is written, which may take the whole limit.
        """
        self._sampled = sampled
        self._groups = groups
        self._texts = TokenTexts(decode=decode)
        self._store = SampleStore(directory, limit_bytes=limit_bytes, only_file=only_file)
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # None: the end
        self._usable = True
        self._finished = False
        self._last_finished: Group | None = None
        self._filtered: list[tuple[Group, str]] = []  # since the last batch
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------- on the run's threads
    def note(self, event: PoolEvent) -> None:
        """Keep groups that are filtered, for the file of the next batch; a ``PoolObserver``."""
        if isinstance(event, Finished):
            self._last_finished = event.group
        elif isinstance(event, Ended):
            group, self._last_finished = self._last_finished, None
            if group is None or event.outcome != Outcome.FILTERED or group.attempt.attempt_id != event.attempt_id:
                return
            if len(self._filtered) < self._groups:
                self._filtered.append((group, event.reason))

    def batch(self, step: int, target_version: int, groups: tuple[Group, ...], table: BranchTable) -> None:
        """Queue a share of a batch that is about to be trained on. ``table``: of all its groups, in order."""
        filtered, self._filtered = self._filtered, []
        written_at = time.time()
        self.queue(lambda: self._write_batch(step, target_version, groups, table, filtered, written_at))

    def evaluation(self, step: int) -> EvaluationSamples:
        """Record the evaluation after ``step`` steps."""
        return EvaluationSamples(self._store, self._texts, self.queue, step=step)

    def queue(self, work: Work) -> None:
        """Do ``work`` in the thread; drop it if the disk is too slow, or nothing is written any more."""
        if not self._usable or self._finished:
            return
        if self._queue.qsize() < CAPACITY:
            self._queue.put(work)
        elif self._store.drop():
            log.warning("samples are written too slowly: some are left out")

    def finish(self) -> None:
        """Write what is queued, for a few seconds at most; idempotent."""
        if not self._finished:
            self._finished = True
            self._queue.put(None)
            self._thread.join(FINISH_SECONDS)
            if self._thread.is_alive():
                log.warning("samples were not written in time; the last ones may be missing")

    # ------------------------------------------------------------------------------------------------- in the thread
    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except OSError as error:  # a disk that is full or gone
                self._usable = False
                self._store.stop(str(error))
                log.warning("samples cannot be written; the run continues without them", error=str(error))
                return
            except Exception as error:  # supervision point: a run without these samples is better than no run
                if self._store.drop():
                    log.warning("a batch's samples cannot be written; the run continues", error=repr(error))

    def _write_batch(
        self,
        step: int,
        target_version: int,
        groups: tuple[Group, ...],
        table: BranchTable,
        filtered: Sequence[tuple[Group, str]],
        written_at: float,
    ) -> None:
        if not self._store.wants("train", step):
            return
        chosen = _share(len(groups), self._groups, step)
        rows: list[SampleRow] = []
        for index in chosen:
            place = Place(kind="train", step=step, target_version=target_version, written_at=written_at)
            if self._sampled:
                rows += rows_of(groups[index], place, self._texts, advantages=_advantages(table, index))
            else:
                rows += map(without_sampling, rows_of(groups[index], place, self._texts))
        for group, reason in filtered:
            place = Place(kind="train", step=step, filtered=reason or "filtered", written_at=written_at)
            rows += rows_of(group, place, self._texts)
        fewer = f"--save-samples {self._groups}" if len(chosen) < len(groups) else None
        note = FileNote(kind="train", step=step, groups=len(groups), groups_written=len(chosen), why_fewer=fewer)
        self._store.write(note, rows)


def _share(there: int, wanted: int, step: int) -> list[int]:
    """Positions of ``wanted`` groups of a batch, chosen by the step's number alone, so that the oldest have no
    advantage.
    """
    return sorted(random.Random(step).sample(range(there), min(there, wanted)))


def _advantages(table: BranchTable, group: int) -> list[Float32]:
    """The advantages of each branch of a group, [T] each."""
    batch = table.join(np.flatnonzero(table.group_ids == group))
    return np.split(token_advantages(batch), batch.offsets[1:-1])
