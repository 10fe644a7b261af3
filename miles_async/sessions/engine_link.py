"""Generation for the session server through the rollout process, over a socket in the file system.

Whether requests may go out, and whether an answer may be used, is known in one place: the client of the rollout
process, next to the registry of engines (C8). So the session server asks it instead of the router. Two ends::

    session server                           rollout process
    EngineLink.generate ───── Asked ──────►  serve_engines ──► RouterClient
                        ◄─ Answered, Failed ─

All requests share one connection, as frames of msgpack that name their request: HTTP would cost both processes more
than the rest of a turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog

from miles_async.api import EngineClient
from miles_async.errors import MilesAsyncError, TransientEngineError, by_name
from miles_async.runtime.serialization import decode, encode
from miles_async.sessions.records import Alive
from miles_async.types import GenerateRequest, Generation

log = structlog.get_logger(__name__)

_LENGTH_BYTES = 8
_BUFFER_BYTES = 1 << 20


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A generation call, session server → rollout process."""

    number: int  # of the request, on its connection
    request: GenerateRequest


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Withdraws a request whose answer is no longer needed, session server → rollout process."""

    number: int


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a call, rollout process → session server."""

    number: int
    generation: Generation


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The client raised, which is an answer as good as any, rollout process → session server."""

    number: int
    error: str  # name of a class of ``errors.py``
    message: str


class ToRollout(msgspec.Struct, frozen=True):
    """A frame, session server → rollout process."""

    said: Asked | Withdrawn | Alive


class FromRollout(msgspec.Struct, frozen=True):
    """A frame, rollout process → session server."""

    said: Answered | Failed


class EngineLink:
    """EngineClient of the session server, its end of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Generation]] = {}
        self._asked = 0
        self._over = False

    @classmethod
    async def connect(cls, socket_path: Path) -> EngineLink:
        """Raises TransientEngineError if the rollout process is gone."""
        try:
            return cls(*await asyncio.open_unix_connection(socket_path, limit=_BUFFER_BYTES))
        except OSError as error:
            raise _gone(error) from error

    async def generate(self, request: GenerateRequest) -> Generation:
        """See ``api.EngineClient``; the deadlines are those of the client on the other side."""
        self._asked += 1
        number = self._asked
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(Asked(number=number, request=request))
            return await answer
        except asyncio.CancelledError:
            with suppress(TransientEngineError):
                await self._send(Withdrawn(number=number))
            raise
        finally:
            del self._waiting[number]

    async def report(self, alive: Alive) -> None:
        """Send a report. Raises TransientEngineError when the rollout process is gone."""
        await self._send(alive)

    async def receive(self) -> None:
        """Hand out answers. Raises TransientEngineError when the rollout process is gone, as calls under way do."""
        try:
            async for frame in _frames(self._reader):
                self._hand_out(decode(frame, FromRollout).said)
            raise _gone(None)
        finally:
            self._over = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(_gone(None))

    def _hand_out(self, told: Answered | Failed) -> None:
        answer = self._waiting.get(told.number)
        if answer is None or answer.done():  # withdrawn meanwhile
            return
        if isinstance(told, Answered):
            answer.set_result(told.generation)
        else:
            answer.set_exception(_raised(told))

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def _send(self, said: Asked | Withdrawn | Alive) -> None:
        if self._over:
            raise _gone(None)
        try:
            await _write(self._writer, ToRollout(said))
        except OSError as error:
            raise _gone(error) from error


async def serve_engines(
    client: EngineClient, on_alive: Callable[[Alive], None], socket_path: Path
) -> Callable[[], Awaitable[None]]:
    """Serve generation to session servers, at the rollout process's end. Returns a function that stops it."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await _serve_connection(client, on_alive, reader, writer)
        except asyncio.CancelledError:
            pass  # by stop(), below; asyncio 3.11 would log it as an error
        finally:
            connections.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(serve, socket_path, limit=_BUFFER_BYTES)

    async def stop() -> None:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    return stop


async def _serve_connection(
    client: EngineClient,
    on_alive: Callable[[Alive], None],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(asked: Asked) -> None:
        told: Answered | Failed
        try:
            told = Answered(number=asked.number, generation=await client.generate(asked.request))
        except MilesAsyncError as error:
            told = Failed(number=asked.number, error=type(error).__name__, message=str(error))
        except Exception as error:  # supervision point: a request that nobody foresaw fails alone
            log.exception("a request of the session server failed")
            told = Failed(number=asked.number, error=TransientEngineError.__name__, message=repr(error))
        with suppress(OSError):  # the session server is gone, and with it whoever waits
            await _write(writer, FromRollout(told))

    async with asyncio.TaskGroup() as scope:
        async for frame in _frames(reader):
            match decode(frame, ToRollout).said:
                case Asked() as asked:
                    running[asked.number] = task = scope.create_task(answer(asked))
                    task.add_done_callback(partial(_forget, running, asked.number))
                case Withdrawn(number=number):
                    # An agent that hangs up ends its request here, and so at the engine.
                    if number in running:
                        running[number].cancel()
                case Alive() as alive:
                    on_alive(alive)
        for task in running.values():
            task.cancel()


def _forget(running: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]) -> None:
    del running[number]


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Frames as they come; ends with the connection."""
    with suppress(asyncio.IncompleteReadError, OSError):
        while True:
            length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
            yield await reader.readexactly(length)


async def _write(writer: asyncio.StreamWriter, record: object) -> None:
    content = encode(record)
    writer.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
    await writer.drain()


def _raised(failed: Failed) -> MilesAsyncError:
    kind = by_name(failed.error)
    if kind is None:
        return TransientEngineError(f"the rollout process failed: {failed.error}: {failed.message}")
    return kind(failed.message)


def _gone(error: OSError | None) -> TransientEngineError:
    return TransientEngineError("the rollout process does not answer" + (f": {error!r}" if error else ""))
