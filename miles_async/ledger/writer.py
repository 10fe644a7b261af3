"""Write pool events to the ledger on disk, off the event loop."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from miles_async.errors import LedgerError
from miles_async.ledger.queued_writer import FLUSH_SECONDS, QueuedWriter
from miles_async.ledger.store import (
    Carried,
    CheckedEvent,
    CutEvent,
    EndedEvent,
    FinishedEvent,
    IssuedEvent,
    LedgerEvent,
    LedgerStore,
    RestoredEvent,
    TrimmedEvent,
)
from miles_async.runtime.texts import shortened
from miles_async.staleness.attempts import DeadLetter
from miles_async.staleness.ledger import Balance, Outcome, Stage
from miles_async.staleness.observer import PoolObserver
from miles_async.types import Attempt, Group


class LedgerWriter(QueuedWriter[LedgerEvent], PoolObserver):
    """Queues events of the pool. Raises LedgerError if the disk is full, gone, or hangs, and ContractViolation if the
    ledger on disk contradicts the pool (C2).
    """

    failures = sqlite3.Error

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, flush_seconds: float = FLUSH_SECONDS
    ) -> None:
        """Creates the ledger at ``path``. Raises LedgerError."""
        super().__init__(path, flush_seconds=flush_seconds)
        self._clock = clock
        try:
            self._store = LedgerStore(path)
        except sqlite3.Error as error:
            raise self._error(error) from error

    # --------------------------------------------------------------------------------------------- the pool's side
    def restored(self, balance: Balance, quarantined: Sequence[DeadLetter]) -> None:
        self.add(RestoredEvent(at=self._clock(), carried=Carried(balance=balance, quarantined=tuple(quarantined))))

    def issued(self, attempt: Attempt) -> None:
        self.add(IssuedEvent(at=self._clock(), attempt=attempt))

    def finished(self, group: Group) -> None:
        self.add(FinishedEvent(at=self._clock(), group=group))

    def trimmed(self, group: Group, left_out: int) -> None:
        self.add(TrimmedEvent(at=self._clock(), group=group, left_out=left_out))

    def cut(self, attempt_ids: Sequence[int], target_version: int) -> None:
        self.add(CutEvent(at=self._clock(), attempt_ids=tuple(attempt_ids), target_version=target_version))

    def ended(
        self,
        attempt_id: int,
        outcome: Outcome,
        reason: str = "",
        *,
        target_version: int | None = None,
        step: int | None = None,
    ) -> None:
        self.add(
            EndedEvent(
                at=self._clock(),
                attempt_id=attempt_id,
                outcome=outcome,
                reason=shortened(reason),
                target_version=target_version,
                step=step,
            )
        )

    def checked(self, issued: int, live: Mapping[int, Stage]) -> None:
        self.add(CheckedEvent(at=self._clock(), issued=issued, live=live))

    # --------------------------------------------------------------------------------------------- the disk's side
    async def settle(self, balance: Balance) -> None:
        """Write the remaining events and compare the ledger with the pool's balance."""

        def work() -> None:
            self._write()
            self._store.compare(balance)

        await self._in_thread(work)

    def _put(self, items: Sequence[LedgerEvent]) -> None:
        self._store.write(items)

    def _close(self) -> None:
        self._store.close()

    def _error(self, problem: object) -> LedgerError:
        return LedgerError(f"{self._path}: cannot write the ledger: {problem}; see --run-dir")
