"""Brings what the pool does to the ledger on disk, in batches, off the event loop."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from miles_async.errors import LedgerError, MilesAsyncError
from miles_async.staleness.attempts import DeadLetter
from miles_async.staleness.ledger import Balance, Outcome, Stage
from miles_async.staleness.ledger_store import (
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
from miles_async.staleness.observer import PoolObserver
from miles_async.types import Attempt, Group

log = structlog.get_logger(__name__)

FLUSH_SECONDS = 0.25  # what a killed run lacks in its ledger
WRITE_TIMEOUT = 60.0  # for one flush; a disk that hangs must not fill the memory with waiting events


class LedgerWriter(PoolObserver):
    """Takes events from the pool and never holds it up; :meth:`run` writes them.

    A failing write is an error of :meth:`run`, once, and with it of the run; what comes after it is not recorded.
    """

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, flush_seconds: float = FLUSH_SECONDS
    ) -> None:
        """Creates the ledger at ``path``. Raises LedgerError."""
        self._path = path
        self._clock = clock
        self._flush_seconds = flush_seconds
        self._events: deque[LedgerEvent] = deque()
        self._writing = threading.Lock()  # a flush that was cancelled goes on in its thread
        self._is_open = True
        try:
            self._store = LedgerStore(path)
        except sqlite3.Error as error:
            raise self._error(error) from error

    # --------------------------------------------------------------------------------------------- the pool's side
    def restored(self, balance: Balance, quarantined: Sequence[DeadLetter]) -> None:
        self._add(RestoredEvent(at=self._clock(), carried=Carried(balance=balance, quarantined=tuple(quarantined))))

    def issued(self, attempt: Attempt) -> None:
        self._add(IssuedEvent(at=self._clock(), attempt=attempt))

    def finished(self, group: Group) -> None:
        self._add(FinishedEvent(at=self._clock(), group=group))

    def trimmed(self, group: Group, left_out: int) -> None:
        self._add(TrimmedEvent(at=self._clock(), group=group, left_out=left_out))

    def cut(self, attempt_ids: Sequence[int], target_version: int) -> None:
        self._add(CutEvent(at=self._clock(), attempt_ids=tuple(attempt_ids), target_version=target_version))

    def ended(
        self,
        attempt_id: int,
        outcome: Outcome,
        reason: str = "",
        *,
        target_version: int | None = None,
        step: int | None = None,
    ) -> None:
        self._add(
            EndedEvent(
                at=self._clock(),
                attempt_id=attempt_id,
                outcome=outcome,
                reason=reason,
                target_version=target_version,
                step=step,
            )
        )

    def checked(self, issued: int, live: Mapping[int, Stage]) -> None:
        self._add(CheckedEvent(at=self._clock(), issued=issued, live=live))

    def _add(self, event: LedgerEvent) -> None:
        if self._is_open:
            self._events.append(event)

    # --------------------------------------------------------------------------------------------- the disk's side
    async def run(self) -> None:
        """Write what has come, a few times a second, until cancelled.

        Raises:
            LedgerError: the disk is full, gone, or hangs.
            ContractViolation: the ledger on disk contradicts the pool (C2).
        """
        while True:
            await asyncio.sleep(self._flush_seconds)
            await self.flush()

    async def flush(self) -> None:
        """Everything up to now is on disk when this returns. Raises as :meth:`run` does."""
        await self._in_thread(self._write)

    async def settle(self, balance: Balance) -> None:
        """The end of a run: write the rest, and compare all of it with the pool's balance. Raises as :meth:`run`."""

        def work() -> None:
            self._write()
            self._store.compare(balance)

        await self._in_thread(work)

    async def close(self) -> None:
        """Write what can be written, and close the file; raises nothing, for there may be an error already."""
        try:
            if self._is_open:
                await self.flush()
        except MilesAsyncError as error:
            log.error("the end of the ledger is lost", path=str(self._path), error=str(error))
        finally:
            self._is_open = False
            if self._writing.acquire(blocking=False):  # else its thread hangs at the disk and has the file for ever
                self._store.close()
                self._writing.release()

    async def _in_thread(self, work: Callable[[], object]) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT):
                await asyncio.to_thread(self._locked, work)
        except TimeoutError as error:
            self._is_open = False
            raise LedgerError(f"{self._path}: writing took longer than {WRITE_TIMEOUT:g} s; see --run-dir") from error
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _locked(self, work: Callable[[], object]) -> None:
        with self._writing:
            if not self._is_open:
                return
            try:
                work()
            except BaseException:
                self._is_open = False
                raise

    def _write(self) -> None:
        # In a thread, while the pool goes on: what is appended meanwhile is for the next time.
        if events := [self._events.popleft() for _ in range(len(self._events))]:
            self._store.write(events)

    def _error(self, error: sqlite3.Error) -> LedgerError:
        return LedgerError(f"{self._path}: cannot write the ledger: {error}; see --run-dir")
