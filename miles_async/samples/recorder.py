"""Record samples of a run in a separate thread, behind a bounded queue.

Samples never block or end training: :meth:`SampleRecorder.batch` and the like only queue references; a full queue drops
and counts; a disk that is full or gone is one warning, after which nothing more is written.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import structlog

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.samples.columns import FileNote, SampleRow
from miles_async.samples.evaluation import EvaluationSamples
from miles_async.samples.files import DIRECTORY
from miles_async.samples.rows import Decode, Place, TokenTexts, rows_of, without_sampling
from miles_async.samples.store import SampleStore
from miles_async.staleness.events import Ended, Finished, PoolEvent
from miles_async.staleness.ledger import Outcome
from miles_async.train_data.batch import BranchTable, token_advantages
from miles_async.types import Float32, Group, Int64, TokenScores

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
        batches hold samples, not examples without rewards, versions and advantages. ``only_file``: one file is written,
        which may take the whole limit.
        """
        self._sampled = sampled
        self._groups = groups
        self._texts = TokenTexts(decode=decode)
        self._store = SampleStore(directory, limit_bytes=limit_bytes, only_file=only_file)
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # None: the end
        self._usable = True
        self._finished = False
        self._patient = only_file  # the file is what the run is for: wait for it as long as the disk takes more
        self._done = 0  # items
        self._cut: dict[int, Callable[[Sequence[TokenScores]], None]] = {}  # step → writes its samples with scores
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

    def chosen(self, batch_id: int, groups: int) -> Sequence[int]:
        """Positions of the groups that are written, of so many in a batch: chosen by the step's number alone, so that
        the oldest have no advantage.
        """
        return sorted(random.Random(batch_id).sample(range(groups), min(groups, self._groups)))

    def batch(self, batch_id: int, target_version: int, groups: tuple[Group, ...], table: BranchTable) -> None:
        """Keep a batch that is about to be trained on until :meth:`trained`. ``table``: of all its groups, in order."""
        filtered, self._filtered = self._filtered, []
        place = Place(kind="train", step=batch_id, target_version=target_version, written_at=time.time())
        self._cut[batch_id] = partial(self._write_batch, place, groups, table, filtered)

    def trained(self, step: int, scores: Sequence[TokenScores] = ()) -> None:
        """Queue the share of a batch that is written. ``scores``: of its branches; None where the trainer has none."""
        if write := self._cut.pop(step, None):
            self.queue(partial(write, scores))

    def evaluation(self, step: int) -> EvaluationSamples:
        """Record the evaluation after ``step`` steps."""
        return EvaluationSamples(self._store, self._texts, self.queue, step=step)

    def queue(self, work: Work, *, always: bool = False) -> bool:
        """Do ``work`` in the thread; unless ``always``, drop it if the disk is too slow. False if it is dropped, or
        nothing is written any more.
        """
        if not self._usable or self._finished:
            return False
        if always or self._queue.qsize() < CAPACITY:
            self._queue.put(work)
            return True
        if self._store.drop():
            log.warning("samples are written too slowly: some are left out")
        return False

    def finish(self) -> None:
        """Write queued samples, for a few seconds at most, or if there is ``only_file``, while the disk takes more;
        idempotent.
        """
        if not self._finished:
            for step in sorted(self._cut):  # which training did not reach, or failed at
                self.trained(step)
            self._finished = True
            self._queue.put(None)
            done = -1
            while self._thread.is_alive() and done < (self._done if self._patient else 0):
                done = self._done
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
            self._done += 1

    def _write_batch(
        self,
        place: Place,
        groups: tuple[Group, ...],
        table: BranchTable,
        filtered: Sequence[tuple[Group, str]],
        scores: Sequence[TokenScores],
    ) -> None:
        step = place.step
        if not self._store.wants("train", step):
            return
        chosen = self.chosen(step, len(groups))
        scored = {each.branch: each for each in scores}
        rows: list[SampleRow] = []
        for index in chosen:
            branches = np.flatnonzero(table.group_ids == index)
            of_branches = [scored.get(branch) for branch in branches.tolist()]
            if self._sampled:
                advantages = _advantages(table, branches)
                rows += rows_of(groups[index], place, self._texts, advantages=advantages, scores=of_branches)
            else:
                rows += map(without_sampling, rows_of(groups[index], place, self._texts, scores=of_branches))
        for group, reason in filtered:
            untrained = replace(place, target_version=None, filtered=reason or "filtered")
            rows += rows_of(group, untrained, self._texts)
        fewer = f"--save-samples {self._groups}" if len(chosen) < len(groups) else None
        note = FileNote(kind="train", step=step, groups=len(groups), groups_written=len(chosen), why_fewer=fewer)
        self._store.write(note, rows)


def _advantages(table: BranchTable, branches: Int64) -> list[Float32]:
    """The advantages of each of these branches, [T] each."""
    batch = table.join(branches)
    return np.split(token_advantages(batch), batch.offsets[1:-1])


def sample_recorder(
    arguments: ObservabilityArguments, decode: Decode, *, sampled: bool = True, only_file: bool = False
) -> SampleRecorder | None:
    """Start a run's recorder; None with ``--save-samples 0``. For the others see :class:`SampleRecorder`."""
    if not arguments.save_samples:
        return None
    return SampleRecorder(
        arguments.run_dir / DIRECTORY,
        groups=arguments.save_samples,
        limit_bytes=int(arguments.save_samples_gib * 2**30),
        decode=decode,
        sampled=sampled,
        only_file=only_file,
    )
