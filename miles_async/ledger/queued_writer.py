"""Write items from the event loop to a file, in batches, in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from miles_async.errors import MilesAsyncError
from miles_async.runtime.own_thread import OwnThread
from miles_async.staleness.ledger import Balance

log = structlog.get_logger(__name__)

FLUSH_SECONDS = 0.25  # the time that a killed run may lack at the end of its files
WRITE_TIMEOUT = 60.0  # for one flush; a disk that hangs must not fill the memory with queued items


class QueuedWriter[T]:
    """:meth:`add` never waits and never fails; :meth:`run` writes the entries.

    A failing write is an error of :meth:`run`, once, and so ends the training run; later items are not recorded.
    Subclasses say how to open (:meth:`_open`), write (:meth:`_put`) and close (:meth:`_close`), and which error of the
    project their ``failures`` become (:meth:`_error`).
    """

    failures: type[Exception] | tuple[type[Exception], ...] = OSError

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, flush_seconds: float = FLUSH_SECONDS
    ) -> None:
        """Creates the file. Raises the error of the project. ``clock``: for subclasses."""
        self._path = path
        self._clock = clock
        self._flush_seconds = flush_seconds
        self._waiting: deque[T] = deque()
        self._writing = threading.Lock()  # a cancelled flush continues in its thread
        self._is_open = True
        self._thread = OwnThread(path.stem)
        try:
            self._open()
        except self.failures as error:
            raise self._error(error) from error

    def add(self, item: T) -> None:
        """Queue an item; items are written in order. Thread-safe."""
        if self._is_open:
            self._waiting.append(item)

    async def run(self) -> None:
        """Write queued items a few times a second until cancelled. Raises what :meth:`_put` and the disk do."""
        while True:
            await asyncio.sleep(self._flush_seconds)
            await self.flush()

    async def flush(self) -> None:
        """Write everything queued so far. Raises as :meth:`run` does."""
        await self._in_thread(self._write)

    async def settle(self, balance: Balance) -> None:
        """End the file of a run that did not fail, given the pool's last ``balance``. Raises as :meth:`run` does."""
        await self.flush()

    async def close(self) -> None:
        """Write as much as possible and close the file; raises nothing, since the run may be failing already."""
        try:
            if self._is_open:
                await self.flush()
        except MilesAsyncError as error:
            log.error("the end of a file is lost", path=str(self._path), error=str(error))
        finally:
            self._is_open = False
            if self._writing.acquire(blocking=False):  # else a thread that hangs at the disk still owns the file
                self._close()
                self._writing.release()

    # ------------------------------------------------------------------------------------- for subclasses
    def _open(self) -> None:
        raise NotImplementedError

    def _put(self, items: Sequence[T]) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _error(self, problem: object) -> MilesAsyncError:
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------- in the thread
    async def _in_thread(self, work: Callable[[], object]) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT):
                await self._thread.run(self._locked, work)
        except TimeoutError as error:
            self._is_open = False
            raise self._error(f"writing took longer than {WRITE_TIMEOUT:g} s") from error
        except self.failures as error:
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
        # Runs in a thread while the loop adds items, which the next call writes.
        if items := [self._waiting.popleft() for _ in range(len(self._waiting))]:
            self._put(items)
