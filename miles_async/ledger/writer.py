"""Write pool events to the ledger on disk, off the event loop."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from miles_async.errors import LedgerError
from miles_async.ledger.queued_writer import FLUSH_SECONDS, QueuedWriter
from miles_async.ledger.store import LedgerStore, TimedEvent
from miles_async.staleness.events import PoolEvent
from miles_async.staleness.ledger import Balance


class LedgerWriter(QueuedWriter[TimedEvent]):
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

    def note(self, event: PoolEvent) -> None:
        """Queue an event of the pool; a ``PoolObserver``."""
        self.add((self._clock(), event))

    async def settle(self, balance: Balance) -> None:
        """Write the remaining events and compare the ledger with the pool's balance."""

        def work() -> None:
            self._write()
            self._store.compare(balance)

        await self._in_thread(work)

    def _put(self, items: Sequence[TimedEvent]) -> None:
        self._store.write(items)

    def _close(self) -> None:
        self._store.close()

    def _error(self, problem: object) -> LedgerError:
        return LedgerError(f"{self._path}: cannot write the ledger: {problem}; see --run-dir")
