"""Supervision of one process of the session server: started, restarted when it dies or falls silent, stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import structlog

from miles_async.api import EngineClient
from miles_async.errors import EngineError, EngineStartError, first_error
from miles_async.runtime.clock import now
from miles_async.runtime.processes.restarts import RestartBudget
from miles_async.sessions.engine_link import Alive, serve_engines

log = structlog.get_logger(__name__)


class Child(Protocol):
    """The process (``runtime.processes.child_process.ChildProcess``)."""

    def start(self) -> None: ...

    async def wait(self) -> int: ...

    async def stop(self, grace_seconds: float = ...) -> None: ...

    def tail(self, lines: int = ...) -> str: ...


_LOOK_SECONDS = 1.0

Launch = Callable[[Path, int, int], Child]
"""(socket to report to, number of the worker, which start of it this is) → the process, not started yet."""


class SessionWorker:
    """One process of the session server. Its sessions are lost when it dies."""

    def __init__(
        self,
        index: int,
        client: EngineClient,
        launch: Launch,
        *,
        on_alive: Callable[[Alive], None],
        start_timeout: float,
        silence_timeout: float,
        budget: RestartBudget,
    ) -> None:
        """``on_alive``: called with each report of the running process. ``silence_timeout``: seconds without a report
        after which the process counts as dead.
        """
        self.name = f"worker {index} of the session server"
        self._index = index
        self._client = client
        self._launch = launch
        self._report = on_alive
        self._start_timeout = start_timeout
        self._silence_timeout = silence_timeout
        self._budget = budget
        self._starts = 0
        self._child: Child | None = None
        self._alive: Alive | None = None  # last report of the process
        self._heard = 0.0  # when that was
        self._gone: set[str] = set()  # instances whose reports are ignored
        self._up = asyncio.Event()
        self._socket: Path | None = None
        self._stop_serving: Callable[[], Awaitable[None]] | None = None

    @property
    def instance_id(self) -> str:
        """Instance id of the process that reported last; it changes with every start."""
        return self._alive.instance_id if self._alive else ""

    @property
    def url(self) -> str | None:
        """URL of the process; None while it is being started."""
        return self._alive.url if self._alive is not None and self._up.is_set() else None

    async def start(self, socket: Path) -> None:
        """Start the process and wait until it listens. Raises EngineStartError with its last log lines."""
        self._socket = socket
        self._stop_serving = await serve_engines(self._client, self._on_alive, socket)
        await self._start_process()

    async def supervise(self) -> None:
        """Restart the process whenever it dies, forever. Raises EngineError if that happens too often."""
        while True:
            why = await self._until_gone()
            assert self._child is not None
            assert self._alive is not None
            tail = self._child.tail()
            self._gone.add(self._alive.instance_id)
            self._up.clear()
            await self._child.stop(grace_seconds=0)
            if not self._budget.take():
                raise EngineError(f"{self.name} was restarted {self._budget}, and now it {why}:\n{tail}")
            log.warning(f"{self.name} is gone, its sessions are lost; starting it again", why=why)
            await self._start_process()

    async def stop(self) -> None:
        self._up.clear()
        if self._child is not None:
            await self._child.stop(grace_seconds=0)
        if self._stop_serving is not None:
            await self._stop_serving()

    async def _start_process(self) -> None:
        assert self._socket is not None
        self._child = child = self._launch(self._socket, self._index, self._starts)
        self._starts += 1
        child.start()
        try:
            async with asyncio.timeout(self._start_timeout), asyncio.TaskGroup() as scope:
                early_end = scope.create_task(self._fail_at_exit(child))
                await self._up.wait()
                early_end.cancel()
        except TimeoutError:
            limit = self._start_timeout
            raise EngineStartError(f"{self.name} did not come up within {limit:g} s:\n{child.tail()}") from None
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _fail_at_exit(self, child: Child) -> None:
        status = await child.wait()
        raise EngineStartError(f"{self.name} ended with status {status}:\n{child.tail()}")

    def _on_alive(self, alive: Alive) -> None:
        if alive.instance_id not in self._gone:
            self._alive, self._heard = alive, now()
            self._up.set()
            self._report(alive)

    async def _until_gone(self) -> str:
        """Wait until the process needs a restart; return the reason."""
        assert self._child is not None
        while (silent := now() - self._heard) <= self._silence_timeout:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_SECONDS, self._silence_timeout - silent + 0.1)):
                    return f"ended with status {await self._child.wait()}"
        return f"was silent for {silent:.0f} s"
