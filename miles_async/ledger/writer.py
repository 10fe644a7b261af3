"""Write pool events to the ledger on disk, off the event loop."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from miles_async.errors import LedgerError
from miles_async.ledger.queued_writer import QueuedWriter
from miles_async.ledger.store import LedgerStore, TimedEvent
from miles_async.staleness.events import PoolEvent
from miles_async.staleness.ledger import Balance


class LedgerWriter(QueuedWriter[TimedEvent]):
    """Queues events of the pool. Raises LedgerError if the disk is full, gone, or hangs, and ContractViolation if the
    ledger on disk contradicts the pool (C2).
    """

    failures = sqlite3.Error

    def note(self, event: PoolEvent) -> None:
        """Queue an event of the pool; a ``PoolObserver``."""
        self.add((self._clock(), event))

    async def settle(self, balance: Balance) -> None:
        """Write the remaining events and compare the ledger with the pool's balance."""

        def work() -> None:
            self._write()
            self._store.compare(balance)

        await self._in_thread(work)

    def _open(self) -> None:
        self._store = LedgerStore(self._path)

    def _put(self, items: Sequence[TimedEvent]) -> None:
        self._store.write(items)

    def _close(self) -> None:
        self._store.close()

    def _error(self, problem: object) -> LedgerError:
        return LedgerError(f"{self._path}: cannot write the ledger: {problem}; see --run-dir")
