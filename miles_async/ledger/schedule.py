"""The schedule of a run, for a replay (``wiring/replay.py``): ``schedule.msgpack`` has a frame (``serialization.py``)
for each call of the pool with its decisions, and for the digests of each batch, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate

import msgspec

from miles_async.errors import ScheduleError
from miles_async.ledger.queued_writer import QueuedWriter
from miles_async.runtime.serialization import write_frames
from miles_async.staleness import events
from miles_async.staleness.events import PoolEvent, PoolObserver
from miles_async.staleness.ledger import Balance, Outcome
from miles_async.staleness.pool import Pool, PoolSnapshot
from miles_async.train_data.batch import digests
from miles_async.types import Attempt, Changes, Group, Prompt, TrainShard


# ------------------------------------------------------------------------------------------------ calls
class Call(msgspec.Struct, frozen=True, tag=True):
    """One method call of the pool. Groups that are known already are given by attempt id."""


class Offered(Call, frozen=True):
    epoch: int
    prompt: Prompt


class Issued(Call, frozen=True):
    visible_version: int


class Finished(Call, frozen=True):
    group: Group


class Failed(Call, frozen=True):
    attempt: Attempt
    reason: str
    infrastructure: bool


class Filtered(Call, frozen=True):
    attempt: Attempt
    reason: str
    group: Group | None = None


class Reviewed(Call, frozen=True):
    attempt_id: int
    versions: Mapping[int, int | None]
    target_version: int


class Cut(Call, frozen=True):
    target_version: int


class Trained(Call, frozen=True):
    attempt_ids: tuple[int, ...]  # one batch, as it was cut
    target_version: int


class Committed(Call, frozen=True):
    version: int


class Restored(Call, frozen=True):
    snapshot: PoolSnapshot
    version: int
    total_groups: int | None
    readmissions: Mapping[str, tuple[str, ...]]


class Changed(Call, frozen=True):
    changes: Changes


class Cancelled(Call, frozen=True):
    pass


AnyCall = (
    Offered | Issued | Finished | Failed | Filtered | Reviewed | Cut | Trained | Committed | Restored | Changed
    | Cancelled
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- decisions
class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    attempt_id: int
    outcome: Outcome
    reason: str = ""


class Trimmed(msgspec.Struct, frozen=True):
    """A group that kept only its fresh samples."""

    attempt_id: int
    left_out: int


class Decisions(msgspec.Struct, kw_only=True):
    """All consequences of one call."""

    restored: Balance | None = None
    admitted: list[Attempt] = []
    trimmed: list[Trimmed] = []
    aborted: tuple[int, ...] = ()  # samples of the attempt that was reviewed
    ended: list[Ended] = []
    batch: tuple[int, ...] = ()  # attempts, in batch order
    error: str = ""  # the error that the call raised, which ends the run
    room: int = 0  # attempts that may be issued afterwards

    def note(self, event: PoolEvent) -> None:
        match event:
            case events.Restored(balance):
                self.restored = balance
            case events.Issued(attempt):
                self.admitted.append(attempt)
            case events.Trimmed(group, left_out):
                self.trimmed.append(Trimmed(group.attempt.attempt_id, left_out))
            case events.Ended(attempt_id, outcome, reason):
                self.ended.append(Ended(attempt_id, outcome, reason))
            case events.Cut(attempt_ids):
                self.batch = attempt_ids


# ---------------------------------------------------------------------------------------------- frames of the file
class PoolFrame(msgspec.Struct, frozen=True, kw_only=True, tag="pool"):
    """One call of the pool, with its decisions."""

    at: float  # seconds since 1970
    call: AnyCall
    decisions: Decisions


class BatchFrame(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    """Batch that the trainer got from one cut."""

    at: float
    attempt_ids: tuple[int, ...]
    digests: Mapping[str, str]
    quadratic_work: float = 0.0  # of the model, used to balance sequences; recorded so that a replay needs no model


Frame = PoolFrame | BatchFrame


# ---------------------------------------------------------------------------------------------- the recording pool

Record = Callable[[AnyCall, Decisions], None]


def _recorded[**P, Result](
    method: Callable[Concatenate[RecordedPool, P], Result], call: Callable[P, AnyCall]
) -> Callable[Concatenate[RecordedPool, P], Result]:
    """``method`` of the pool, recorded as ``call`` of its arguments."""

    @wraps(method)
    def recorded(pool: RecordedPool, *arguments: P.args, **named: P.kwargs) -> Result:
        with pool.recorded(call(*arguments, **named)):
            return method(pool, *arguments, **named)

    return recorded


class RecordedPool(Pool):
    """A pool that passes every call to ``record``, right after it; ``record`` must not wait."""

    def __init__(self, *arguments: Any, record: Record, observers: Sequence[PoolObserver] = (), **options: Any) -> None:
        """``arguments``, ``observers``, ``options``: of a Pool."""
        self._record = record
        self._decisions = Decisions()  # of the call that is running
        super().__init__(*arguments, observers=(lambda event: self._decisions.note(event), *observers), **options)

    offer = _recorded(Pool.offer, Offered)
    issue = _recorded(Pool.issue, Issued)
    finished = _recorded(Pool.finished, Finished)
    failed = _recorded(Pool.failed, Failed)
    filtered = _recorded(Pool.filtered, Filtered)
    cut = _recorded(Pool.cut, Cut)
    trained = _recorded(Pool.trained, lambda groups, target_version: Trained(attempt_ids(groups), target_version))
    commit = _recorded(Pool.commit, Committed)
    change = _recorded(Pool.change, Changed)
    cancel_all = _recorded(Pool.cancel_all, Cancelled)

    def review(self, attempt_id: int, versions: Mapping[int, int | None], target_version: int) -> frozenset[int]:
        with self.recorded(Reviewed(attempt_id, dict(versions), target_version)):
            aborted = super().review(attempt_id, versions, target_version)
            self._decisions.aborted = tuple(sorted(aborted))
            return aborted

    def restore(
        self,
        snapshot: PoolSnapshot,
        *,
        version: int,
        total_groups: int | None = None,
        readmissions: Mapping[str, Sequence[str]] | None = None,
        accepted: Sequence[str] = (),
    ) -> None:
        granted = {request_id: tuple(prompt_ids) for request_id, prompt_ids in (readmissions or {}).items()}
        with self.recorded(Restored(snapshot, version, total_groups, granted)):
            super().restore(
                snapshot, version=version, total_groups=total_groups, readmissions=readmissions, accepted=accepted
            )

    @contextmanager
    def recorded(self, call: AnyCall) -> Iterator[None]:
        """Pass the call and the decisions that are made in the context to ``record``."""
        self._decisions = decisions = Decisions()
        try:
            yield
        except Exception as error:
            decisions.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            decisions.room = self.room()
            self._record(call, decisions)


# ------------------------------------------------------------------------------------------------------- on disk
class ScheduleWriter(QueuedWriter[Frame]):
    """Holds groups until they are written, a quarter of a second later. Raises ScheduleError."""

    # A disk that is full, gone, or hangs; metadata that msgpack cannot encode.
    failures = (OSError, TypeError, OverflowError)

    def pool(self, call: AnyCall, decisions: Decisions) -> None:
        self.add(PoolFrame(at=self._clock(), call=call, decisions=decisions))

    def batch(self, groups: Sequence[Group], shards: Sequence[TrainShard], quadratic_work: float) -> None:
        """Record a batch; called by ``BatchMaker``, in its thread."""
        ids = attempt_ids(groups)
        self.add(BatchFrame(at=self._clock(), attempt_ids=ids, digests=digests(shards), quadratic_work=quadratic_work))

    def _open(self) -> None:
        self._file = self._path.open("xb")

    def _put(self, items: Sequence[Frame]) -> None:
        write_frames(self._file, items)
        self._file.flush()

    def _close(self) -> None:
        with suppress(OSError):  # from what an earlier, failed write left in the buffer
            self._file.close()

    def _error(self, problem: object) -> ScheduleError:
        return ScheduleError(f"{self._path}: cannot write the schedule: {problem}; see --run-dir and --record")


def attempt_ids(groups: Sequence[Group]) -> tuple[int, ...]:
    return tuple(group.attempt.attempt_id for group in groups)
