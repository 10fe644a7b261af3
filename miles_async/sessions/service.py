"""Supervision of the session server by the rollout process, which opens sessions and collects them.

A server that dies or falls silent is started again, without its sessions: callers that wait for one of them get a
TransientEngineError, so that its sample is generated again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import aiohttp
import structlog

from miles_async.api import EngineClient
from miles_async.errors import EngineError, EngineStartError, TransientEngineError, first_error
from miles_async.runtime.clock import now
from miles_async.runtime.keys import SessionKeys
from miles_async.runtime.serialization import decode, encode
from miles_async.sessions.engine_link import serve_engines
from miles_async.sessions.records import Alive, SessionSettings
from miles_async.types import CollectedSession, OpenSession

log = structlog.get_logger(__name__)

_CALL_TIMEOUT = aiohttp.ClientTimeout(total=60)
_ABANDON_SECONDS = 1.0
_SOCKET = "engines.sock"


class Child(Protocol):
    """The server's process (``engines.process.ChildProcess``)."""

    def start(self) -> None: ...

    async def wait(self) -> int: ...

    async def stop(self, grace_seconds: float = ...) -> None: ...

    def tail(self, lines: int = ...) -> str: ...


Launch = Callable[[Sequence[str], int], Child]
"""(arguments of the interpreter, which start this is) → the process, not started yet."""


class SessionService:
    """Opens and collects agents' sessions. Everything runs on one event loop."""

    def __init__(
        self,
        client: EngineClient,
        command: Sequence[str],
        launch: Launch,
        *,
        keys: SessionKeys,
        began: Callable[[str, int], None] = lambda key, version: None,
        start_timeout: float = 120.0,
        silence_timeout: float = 30.0,
        max_restarts: int = 10,
    ) -> None:
        """``command``: arguments of the interpreter; the path of the socket to report to is added. ``keys``: of the
        server that ``launch`` makes. ``began``: told the
        routing key of each session of which a turn was kept, and the version of one of its tokens. ``silence_timeout``:
        seconds without a sign of life after which the server is taken for dead.
        """
        self._client = client
        self._command = tuple(command)
        self._launch = launch
        self._keys = keys
        self._began = began
        self._open: dict[str, str] = {}  # session id → routing key
        self._start_timeout = start_timeout
        self._silence_timeout = silence_timeout
        self._max_restarts = max_restarts
        self._starts = 0
        self._child: Child | None = None
        self._alive: Alive | None = None  # last report of the server
        self._heard = 0.0  # when that was
        self._gone: set[str] = set()  # instances whose reports are ignored
        self._up = asyncio.Event()
        self._directory: Path | None = None
        self._stop_serving: Callable[[], Awaitable[None]] | None = None
        self._http: aiohttp.ClientSession | None = None

    @property
    def instance_id(self) -> str:
        """Instance id of the server that reported last; it changes with every start."""
        return self._alive.instance_id if self._alive else ""

    # -------------------------------------------------------------------------------------------- life
    async def start(self) -> None:
        """Start the server and wait until it listens. Raises EngineStartError with its last log lines."""
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=_CALL_TIMEOUT, headers=self._keys.run.headers()
        )
        # Not in the run directory: the path of a socket has 107 characters at most.
        self._directory = Path(tempfile.mkdtemp(prefix="miles-async-"))
        self._stop_serving = await serve_engines(self._client, self._on_alive, self._directory / _SOCKET)
        await self._start_server()

    async def supervise(self) -> None:
        """Restart the server whenever it is gone, forever. Raises EngineError if that happens too often."""
        while True:
            why = await self._until_gone()
            assert self._child is not None
            assert self._alive is not None
            tail = self._child.tail()
            self._gone.add(self._alive.instance_id)
            self._up.clear()
            await self._child.stop(grace_seconds=0)
            if self._starts > self._max_restarts:
                raise EngineError(f"the session server was started {self._starts} times, and now {why}:\n{tail}")
            log.warning("session server gone, its sessions are lost; starting it again", why=why)
            await self._start_server()

    async def stop(self) -> None:
        """End the server and all connections."""
        self._up.clear()
        if self._child is not None:
            await self._child.stop(grace_seconds=0)
        if self._stop_serving is not None:
            await self._stop_serving()
        if self._http is not None:
            await self._http.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _start_server(self) -> None:
        assert self._directory is not None
        self._child = child = self._launch((*self._command, str(self._directory / _SOCKET)), self._starts)
        self._starts += 1
        child.start()
        try:
            async with asyncio.timeout(self._start_timeout), asyncio.TaskGroup() as scope:
                early_end = scope.create_task(self._fail_at_exit(child))
                await self._up.wait()
                early_end.cancel()
        except TimeoutError:
            limit = self._start_timeout
            raise EngineStartError(f"the session server did not come up within {limit:g} s:\n{child.tail()}") from None
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _fail_at_exit(self, child: Child) -> None:
        status = await child.wait()
        raise EngineStartError(f"the session server ended with status {status}:\n{child.tail()}")

    def _on_alive(self, alive: Alive) -> None:
        if alive.instance_id not in self._gone:
            self._alive, self._heard = alive, now()
            self._up.set()
            for session_id, version in alive.began.items():
                if (key := self._open.get(session_id)) is not None:
                    self._began(key, version)

    async def _until_gone(self) -> str:
        """Wait until the server needs a restart; return the reason."""
        assert self._child is not None
        while (silent := now() - self._heard) <= self._silence_timeout:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._silence_timeout - silent + 0.1):
                    return f"ended with status {await self._child.wait()}"
        return f"was silent for {silent:.0f} s"

    # ---------------------------------------------------------------------------------------- sessions
    async def open(self, settings: SessionSettings) -> OpenSession:
        """Open a session. Waits for a server that is being started. Raises TransientEngineError."""
        try:
            async with asyncio.timeout(self._start_timeout):
                await self._up.wait()
        except TimeoutError:
            raise TransientEngineError("the session server is down") from None
        assert self._alive is not None
        session = decode(await self._call(f"{self._alive.url}/sessions", encode(settings)), OpenSession)
        self._open[session.session_id] = settings.routing_key
        return session

    async def collect(self, session: OpenSession) -> CollectedSession:
        """End a session and return its result. Raises TransientEngineError if it is lost."""
        self._open.pop(session.session_id, None)
        return decode(await self._call(f"{session.url}/collect", b""), CollectedSession)

    async def abandon(self, session: OpenSession) -> None:
        """Abandon a session. Best effort: otherwise it expires."""
        self._open.pop(session.session_id, None)
        with suppress(TransientEngineError, TimeoutError):
            async with asyncio.timeout(_ABANDON_SECONDS):
                await self._call(f"{session.url}/collect", b"")

    async def _call(self, url: str, body: bytes) -> bytes:
        assert self._http is not None, "start() comes first"
        try:
            async with self._http.post(url, data=body) as response:
                status, content = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TransientEngineError(f"the session server does not answer: {error!r}") from error
        if status != 200:
            raise TransientEngineError(f"session lost: HTTP {status}: {content.decode(errors='replace')[:500]}")
        return content
