"""The rollout process's side of the session server: worker processes, and the sessions in each.

A session stays in one worker, whose URL its agent is given. A new session goes to the running worker with the fewest
open ones.

A worker that dies or falls silent is restarted without its sessions: their callers get a TransientEngineError, so that
the samples are generated again. The other workers continue.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from miles_async.api import EngineClient
from miles_async.errors import TransientEngineError
from miles_async.runtime.files.owned_directory import OwnedDirectory, temporary_parent
from miles_async.runtime.network.keys import SessionKeys
from miles_async.runtime.network.tls import Tls
from miles_async.runtime.processes.restarts import RestartBudget
from miles_async.runtime.serialization import decode, encode
from miles_async.runtime.tasks import gathered
from miles_async.sessions.engine_link import Alive
from miles_async.sessions.session import SessionSettings
from miles_async.sessions.worker import Launch, SessionWorker
from miles_async.types import CollectedSession, OpenSession

_CALL_TIMEOUT = aiohttp.ClientTimeout(total=60)
_ABANDON_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Held:
    """An open session."""

    routing_key: str
    worker: SessionWorker


class SessionService:
    """Opens and collects agents' sessions. Everything runs on one event loop."""

    def __init__(
        self,
        client: EngineClient,
        launch: Launch,
        *,
        keys: SessionKeys,
        tls: Tls | None = None,
        workers: int = 1,
        began: Callable[[str, int], None] = lambda key, version: None,
        start_timeout: float = 120.0,
        silence_timeout: float = 30.0,
        max_restarts: int = 10,
        restart_window: float = 3600.0,
    ) -> None:
        """``keys``, ``tls``: of the launched processes. ``began``: called with the routing key of each session that
        kept a turn, and the version of one of its tokens. ``silence_timeout``: seconds without a report after which a
        worker counts as dead. ``max_restarts``: of each worker in any ``restart_window`` seconds.
        """
        self._keys = keys
        self._tls = tls
        self._began = began
        self._start_timeout = start_timeout
        self._came_up = asyncio.Event()
        self._sessions: dict[str, _Held] = {}  # by id
        self._load: Counter[SessionWorker] = Counter()  # sessions that are open, or being opened
        self.workers: Sequence[SessionWorker] = [
            SessionWorker(
                index,
                client,
                launch,
                on_alive=self._on_alive,
                start_timeout=start_timeout,
                silence_timeout=silence_timeout,
                budget=RestartBudget(max_restarts, restart_window),
            )
            for index in range(workers)
        ]
        self._directory: OwnedDirectory | None = None
        self._http: aiohttp.ClientSession | None = None

    # -------------------------------------------------------------------------------------------- life
    async def start(self) -> None:
        """Start all workers and wait until they listen. Raises EngineStartError with the last log lines of one."""
        connector = aiohttp.TCPConnector(limit=0, ssl=True if self._tls is None else self._tls.client())
        self._http = aiohttp.ClientSession(connector=connector, timeout=_CALL_TIMEOUT, headers=self._keys.run.headers())
        # Not in the run directory: the path of a socket has 107 characters at most.
        directory = self._directory = OwnedDirectory(temporary_parent(), mode=0o700)
        await gathered(*(worker.start(directory.path / f"{index}.sock") for index, worker in enumerate(self.workers)))

    async def supervise(self) -> None:
        """Restart dead workers, forever. Raises EngineError if that happens too often."""
        await gathered(*(worker.supervise() for worker in self.workers))

    async def stop(self) -> None:
        await gathered(*(worker.stop() for worker in self.workers))
        if self._http is not None:
            await self._http.close()
        if self._directory is not None:
            self._directory.remove()

    def _on_alive(self, alive: Alive) -> None:
        self._came_up.set()
        for session_id, version in alive.began.items():
            if (held := self._sessions.get(session_id)) is not None:
                self._began(held.routing_key, version)

    # ---------------------------------------------------------------------------------------- sessions
    async def open(self, settings: SessionSettings) -> OpenSession:
        """Open a session. Waits for a worker if all are being started. Raises TransientEngineError."""
        worker, url = await self._least_loaded()
        self._load[worker] += 1
        try:
            session = decode(await self._call(f"{url}/sessions", encode(settings)), OpenSession)
        except BaseException:
            self._load[worker] -= 1
            raise
        self._sessions[session.session_id] = _Held(settings.routing_key, worker)
        return session

    async def collect(self, session: OpenSession) -> CollectedSession:
        """End a session and return its result. Raises TransientEngineError if it is lost."""
        self._release(session)
        return decode(await self._call(f"{session.url}/collect", b""), CollectedSession)

    async def abandon(self, session: OpenSession) -> None:
        """Abandon a session. Best effort: otherwise it expires."""
        self._release(session)
        with suppress(TransientEngineError, TimeoutError):
            async with asyncio.timeout(_ABANDON_SECONDS):
                await self._call(f"{session.url}/collect", b"")

    async def _least_loaded(self) -> tuple[SessionWorker, str]:
        """A worker that is up, and its URL. Raises TransientEngineError when none comes up in time."""
        try:
            async with asyncio.timeout(self._start_timeout):
                while not (up := [(worker, url) for worker in self.workers if (url := worker.url) is not None]):
                    self._came_up.clear()
                    await self._came_up.wait()
        except TimeoutError:
            raise TransientEngineError("the session server is down") from None
        return min(up, key=lambda each: self._load[each[0]])

    def _release(self, session: OpenSession) -> None:
        if (held := self._sessions.pop(session.session_id, None)) is not None:
            self._load[held.worker] -= 1

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
