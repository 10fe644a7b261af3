"""Client processes beside the rollout process: requests are shared out among them, and those that die are replaced.

A request goes to the process of its routing key, so that its connections to engines are used again. If that process
dies or falls silent, the request fails as one whose engine died, and the client tries it again.
"""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from miles_async.engines.posting.http_post import Answer
from miles_async.engines.posting.wire import Answered, Failed, Frames, FromProcess, Send, Settings, Withdraw
from miles_async.errors import EngineError, EngineStartError, TransientEngineError
from miles_async.runtime.network.keys import EngineKeys
from miles_async.runtime.network.tls import Tls
from miles_async.runtime.processes.child_process import ChildProcess
from miles_async.runtime.processes.restarts import RestartBudget
from miles_async.runtime.tasks import gathered

log = structlog.get_logger(__name__)

# Seconds without a sign of life after which a process counts as hung: from its start, and later.
_START_SECONDS = 120
_SILENT_SECONDS = 30


Launch = Callable[[int, int, int], ChildProcess]
"""(number of the process, which start of it this is, descriptor of its socket) → the process, not started yet."""


def client_process(path: str, log_dir: Path, keys: EngineKeys | None, tls: Tls | None) -> Launch:
    """Launch processes that post to ``path``, with logs in ``log_dir``. ``keys``, ``tls``: of engines and router."""
    # The admin key stays here: these processes only generate.
    environment = {} if keys is None else EngineKeys(api=keys.api, admin=keys.api).environment()

    def launch(number: int, start: int, connection: int) -> ChildProcess:
        name = f"client-{number}"
        return ChildProcess(
            name,
            Settings(connection=connection, path=path, tls=tls).command(),
            log_path=log_dir / f"{name}.{start}.log",
            environment=environment,
            descriptors=(connection,),
        )

    return launch


class ClientProcesses:
    """All client processes; ``post`` is a ``Post``. Everything runs on one event loop."""

    def __init__(self, count: int, launch: Launch, *, max_restarts: int, restart_window: float) -> None:
        """``max_restarts``: of each process in ``restart_window`` seconds."""
        self.processes = [
            _ClientProcess(number, launch, RestartBudget(max_restarts, restart_window)) for number in range(count)
        ]

    async def start(self) -> None:
        """Start all processes and wait until they run. Raises EngineStartError with the last log lines of one."""
        await gathered(*(process.start() for process in self.processes))

    async def supervise(self) -> None:
        """Replace processes that die or fall silent, until cancelled. Raises EngineError if one does so too often."""
        await gathered(*(process.supervise() for process in self.processes))

    async def stop(self) -> None:
        """End all processes. Requests under way fail."""
        await gathered(*(process.stop() for process in self.processes))

    async def post(self, url: str, routing_key: str, body: bytes) -> Answer:
        """See ``http_post.Post``."""
        process = self.processes[zlib.crc32(routing_key.encode()) % len(self.processes)]
        return await process.link.post(url, routing_key, body)


class _Link(Frames[FromProcess]):
    """The connection to one start of a process, with the requests that were sent over it."""

    def __init__(self, name: str) -> None:
        super().__init__(msgspec.msgpack.Decoder(FromProcess))
        self.heard = asyncio.Event()  # of the process, or of its end
        self._name = name
        self._asked = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    async def post(self, url: str, routing_key: str, body: bytes) -> Answer:
        if self.over:
            raise self._gone()
        self._asked += 1
        number = self._asked
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.send(number, Send(url, routing_key), body)
        try:
            return await waiting
        except asyncio.CancelledError:
            self.send(number, Withdraw())
            raise
        finally:
            del self._waiting[number]

    def received(self, number: int, head: FromProcess, body: bytes) -> None:
        self.heard.set()
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():  # a sign of life; or the request was withdrawn meanwhile
            return
        if isinstance(head, Answered):
            waiting.set_result(
                Answer(status=head.status, content_type=head.content_type, engine_url=head.engine_url, body=body)
            )
        elif isinstance(head, Failed):
            waiting.set_exception(TransientEngineError(head.message))

    def ended(self) -> None:
        self.heard.set()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._gone())

    def _gone(self) -> TransientEngineError:
        return TransientEngineError(f"{self._name} is gone; another one is being started")


class _ClientProcess:
    """One client process, started again when it is gone."""

    def __init__(self, number: int, launch: Launch, budget: RestartBudget) -> None:
        self._name = f"client process {number}"
        self.link = _Link(self._name)  # to the latest start
        self.child: ChildProcess
        self._number = number
        self._launch = launch
        self._budget = budget
        self._starts = 0

    async def start(self) -> None:
        await self._start_process()
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self.link.heard.wait()
        except TimeoutError:
            raise EngineStartError(f"{self._name} was silent for {_START_SECONDS} s:\n{self.child.tail()}") from None
        if self.link.over:
            await self.child.stop(grace_seconds=0)
            raise EngineStartError(f"{self._name} ended with status {self.child.returncode}:\n{self.child.tail()}")

    async def supervise(self) -> None:
        while True:
            why = await self._until_gone()
            self.link.cut()
            await self.child.stop(grace_seconds=0)
            if not self._budget.take():
                raise EngineError(
                    f"{self._name} was restarted {self._budget} (--engine-max-restarts, --engine-restart-window), and "
                    f"now it {why} with status {self.child.returncode}:\n{self.child.tail()}"
                )
            log.warning(f"{self._name} {why}; its requests are tried again", status=self.child.returncode)
            await self._start_process()

    async def stop(self) -> None:
        if self._starts:
            self.link.cut()
            await self.child.stop(grace_seconds=0)

    async def _start_process(self) -> None:
        """Start the process. Requests may be sent from now on: they wait in its socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.child = self._launch(self._number, self._starts, theirs.fileno())
            self._starts += 1
            self.child.start()
        self.link = _Link(self._name)
        await self.link.connect(ours)

    async def _until_gone(self) -> str:
        """Wait until the process needs a restart; return the reason.

        Seconds are counted one by one: while this process's own event loop stands still, the other is not silent.
        """
        silent, limit = 0, _SILENT_SECONDS if self.link.heard.is_set() else _START_SECONDS
        while silent < limit:
            if self.link.over:
                return "ended"
            self.link.heard.clear()
            try:
                async with asyncio.timeout(1.0):
                    await self.link.heard.wait()
                silent, limit = 0, _SILENT_SECONDS
            except TimeoutError:
                silent += 1
        return f"was silent for {limit} s"
