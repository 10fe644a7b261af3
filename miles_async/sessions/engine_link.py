"""Generation for the session server through the rollout process, over a socket in the file system.

Only the rollout process's client, next to the registry of engines, knows whether requests may be sent and whether an
answer may be used (C8), so the session server asks it instead of the router::

    session server                           rollout process
    EngineLink.generate ─── ToRollout ───►  serve_engines ──► RouterClient
                        ◄── FromRollout ──

Frames with tokens precede the answer to a streamed call.

All requests share one connection, as numbered frames of msgpack: HTTP would cost more than the rest of a turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog

from miles_async.api import EngineClient
from miles_async.errors import MilesAsyncError, TransientEngineError, by_name
from miles_async.runtime.serialization import decode, encode
from miles_async.seams.streams import OnTokens, StreamingClient
from miles_async.types import GenerateRequest, Generation

log = structlog.get_logger(__name__)

_LENGTH_BYTES = 8
_BUFFER_BYTES = 1 << 20


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """Sign of life, session server → rollout process, every second once it listens."""

    instance_id: str  # new at every start
    url: str  # where agents reach it
    began: dict[str, int] = {}  # sessions that kept turns since the last message → a version of these tokens


class ToRollout(msgspec.Struct, frozen=True, kw_only=True):
    """Frame, session server → rollout process: a call, its end (no request), or a report (``alive``)."""

    number: int = 0  # of the call, on its connection
    request: GenerateRequest | None = None
    streams: bool = False
    alive: Alive | None = None


class FromRollout(msgspec.Struct, frozen=True, kw_only=True):
    """Frame, rollout process → session server: the answer to a call, the error that it raised, or tokens so far."""

    number: int
    at: int = 0
    token_ids: tuple[int, ...] | None = None  # see ``OnTokens``
    generation: Generation | None = None
    error: str = ""  # name of a class of ``errors.py``
    message: str = ""


class EngineLink:
    """EngineClient of the session server, and ``seams.streams.StreamingClient``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Generation]] = {}
        self._on_tokens: dict[int, OnTokens] = {}  # by number of the call
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
        """See ``api.EngineClient``; the client on the other side sets the deadlines."""
        return await self._call(request, None)

    async def stream(self, request: GenerateRequest, on_tokens: OnTokens) -> Generation:
        return await self._call(request, on_tokens)

    async def _call(self, request: GenerateRequest, on_tokens: OnTokens | None) -> Generation:
        self._asked += 1
        number = self._asked
        if on_tokens is not None:
            self._on_tokens[number] = on_tokens
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(ToRollout(number=number, request=request, streams=on_tokens is not None))
            return await answer
        except (asyncio.CancelledError, TransientEngineError):  # the latter from ``on_tokens``: the call runs on
            with suppress(TransientEngineError):
                await self._send(ToRollout(number=number))
            raise
        finally:
            del self._waiting[number]
            self._on_tokens.pop(number, None)

    async def report(self, alive: Alive) -> None:
        """Send a report. Raises TransientEngineError when the rollout process is gone."""
        await self._send(ToRollout(alive=alive))

    async def receive(self) -> None:
        """Deliver answers. Raises TransientEngineError when the rollout process is gone, as pending calls do."""
        try:
            async for frame in _frames(self._reader):
                self._deliver(decode(frame, FromRollout))
            raise _gone(None)
        finally:
            self._over = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(_gone(None))

    def _deliver(self, frame: FromRollout) -> None:
        answer = self._waiting.get(frame.number)
        if answer is None or answer.done():  # cancelled meanwhile
            return
        if frame.token_ids is not None:
            try:
                self._on_tokens[frame.number](frame.at, frame.token_ids)
            except TransientEngineError as error:
                answer.set_exception(error)
        elif frame.generation is not None:
            answer.set_result(frame.generation)
        else:
            answer.set_exception(_raised(frame))

    async def close(self) -> None:
        self._writer.close()

    async def _send(self, frame: ToRollout) -> None:
        if self._over:
            raise _gone(None)
        try:
            await _write(self._writer, frame)
        except OSError as error:
            raise _gone(error) from error


async def serve_engines(
    client: EngineClient, on_alive: Callable[[Alive], None], socket_path: Path
) -> Callable[[], Awaitable[None]]:
    """Serve generation to session servers, in the rollout process. Returns a function that stops it."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await _serve_connection(client, on_alive, reader, writer)
        except asyncio.CancelledError:
            pass  # by stop(), below; asyncio (3.12) would log it as an error
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

    async def answer(number: int, request: GenerateRequest, streams: bool) -> None:
        def on_tokens(at: int, token_ids: Sequence[int]) -> None:
            _put(writer, FromRollout(number=number, at=at, token_ids=tuple(token_ids)))

        try:
            if streams and isinstance(client, StreamingClient):
                generation = await client.stream(request, on_tokens)
            else:
                generation = await client.generate(request)
            answered = FromRollout(number=number, generation=generation)
        except MilesAsyncError as error:
            answered = FromRollout(number=number, error=type(error).__name__, message=str(error))
        except Exception as error:  # supervision point: an unforeseen request fails alone
            log.exception("a request of the session server failed")
            answered = FromRollout(number=number, error=TransientEngineError.__name__, message=repr(error))
        with suppress(OSError):  # the session server is gone
            await _write(writer, answered)

    async with asyncio.TaskGroup() as scope:
        async for frame in _frames(reader):
            match decode(frame, ToRollout):
                case ToRollout(alive=Alive() as alive):
                    on_alive(alive)
                case ToRollout(number=number, request=GenerateRequest() as request, streams=streams):
                    running[number] = task = scope.create_task(answer(number, request, streams))
                    task.add_done_callback(partial(running.pop, number))
                case ToRollout(number=number) if number in running:
                    # The agent hung up: end its request here, and so at the engine.
                    running[number].cancel()
        for task in running.values():
            task.cancel()


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield frames until the connection ends."""
    with suppress(asyncio.IncompleteReadError, OSError):
        while True:
            length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
            yield await reader.readexactly(length)


async def _write(writer: asyncio.StreamWriter, record: object) -> None:
    _put(writer, record)
    await writer.drain()


def _put(writer: asyncio.StreamWriter, record: object) -> None:
    """Write without waiting for the other side to read."""
    content = encode(record)
    writer.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)


def _raised(failed: FromRollout) -> MilesAsyncError:
    kind = by_name(failed.error)
    if kind is None:
        return TransientEngineError(f"the rollout process failed: {failed.error}: {failed.message}")
    return kind(failed.message)


def _gone(error: OSError | None) -> TransientEngineError:
    return TransientEngineError("the rollout process does not answer" + (f": {error!r}" if error else ""))
