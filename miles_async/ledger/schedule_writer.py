"""``--record``: the schedule of a run, on disk.

``schedule.msgpack`` has a frame (``serialization.py``) for each call of the pool with its decisions, and for the
digests of each batch, in order. ``replay.py`` reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from miles_async.errors import ScheduleError
from miles_async.ledger.queued_writer import FLUSH_SECONDS, QueuedWriter
from miles_async.ledger.schedule import AnyCall, BatchFrame, Decisions, Frame, PoolFrame, attempt_ids
from miles_async.runtime.serialization import write_frames
from miles_async.train_data.digests import digests
from miles_async.types import Group, TrainShard


class ScheduleWriter(QueuedWriter[Frame]):
    """Holds groups until they are written, a quarter of a second later. Raises ScheduleError."""

    failures = (OSError, TypeError)  # a disk that is full, gone, or hangs; metadata that msgpack does not know

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, flush_seconds: float = FLUSH_SECONDS
    ) -> None:
        """Creates the file. Raises ScheduleError."""
        super().__init__(path, flush_seconds=flush_seconds)
        self._clock = clock
        try:
            self._file = path.open("xb")
        except OSError as error:
            raise self._error(error) from error

    def pool(self, call: AnyCall, decisions: Decisions) -> None:
        """Record a call of ``RecordedPool``."""
        self.add(PoolFrame(at=self._clock(), call=call, decisions=decisions))

    def batch(self, groups: Sequence[Group], shards: Sequence[TrainShard], quadratic_work: float) -> None:
        """Record a batch; called by ``BatchMaker``, in its thread."""
        self.add(
            BatchFrame(
                at=self._clock(),
                attempt_ids=attempt_ids(groups),
                digests=digests(shards),
                quadratic_work=quadratic_work,
            )
        )

    def _put(self, items: Sequence[Frame]) -> None:
        write_frames(self._file, items)
        self._file.flush()

    def _close(self) -> None:
        with suppress(OSError):  # from what an earlier, failed write left in the buffer
            self._file.close()

    def _error(self, problem: object) -> ScheduleError:
        return ScheduleError(f"{self._path}: cannot write the schedule: {problem}; see --run-dir and --record")
