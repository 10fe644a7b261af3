"""Answers agents' requests for turns, in any protocol: read, sample, write."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from aiohttp import web

from miles_async.errors import MilesAsyncError, NoRoomError, first_error
from miles_async.runtime.clock import now
from miles_async.runtime.tasks import gathered
from miles_async.sessions.middleware import failure, most_text, read_conversation
from miles_async.sessions.protocols import messages
from miles_async.sessions.protocols.exchange import Exchange, Read, Surroundings, Writer
from miles_async.sessions.session import Session
from miles_async.trajectory.context import Turn
from miles_async.trajectory.streamed import StreamedTurn
from miles_async.trajectory.taker import InThread, TurnRequest

_KEEP_ALIVE_SECONDS = 15.0  # without an event, before one says that the answer is under way
_PAUSE_SECONDS = 0.05  # between readings of a reply, each of which takes time in proportion to its length
_SHORT_BYTES = 1 << 16  # of a request: parsed faster than handed to a thread and back


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers the requests of all sessions of a process."""

    instance_id: str
    counts: Counter[str]  # of requests, turns and tokens, which it raises
    in_thread: InThread

    async def answer(self, request: web.Request, session: Session, read: Read) -> web.StreamResponse:
        """Answer a request of a protocol.

        Raises TrajectoryError for a request that is malformed or asks for something unsupported, and EngineError.
        """
        body = await _body(request, session)
        asked = await self._read(session, read, body)
        session.check(asked.turn)
        await self._check_text(session, asked.turn, len(body))
        if asked.writer is not None:
            return await self._stream(request, session, asked, asked.writer)
        return web.json_response(body=msgspec.json.encode(asked.answer(await self._take(session, asked))))

    async def count(self, request: web.Request, session: Session) -> web.Response:
        """Answer a request for the tokens of a conversation, including sampled ones.

        Raises TrajectoryError.
        """
        body, around = await _body(request, session), self._around(session)
        count = await self.in_thread(lambda: session.count(messages.read_count(body, around)))
        return web.json_response({"input_tokens": count})

    def _around(self, session: Session) -> Surroundings:
        self.counts["requests"] += 1
        trajectory = session.taker.trajectory
        return Surroundings(
            answer_id=f"{self.instance_id}-{self.counts['requests']}",
            decode=trajectory.renderer.chat.decode_all,
            variables=trajectory.renderer.chat.variables,
            history=session.history,
            keep_image=trajectory.keep_image,
        )

    async def _read(self, session: Session, read: Read, body: bytes) -> Exchange:
        around = self._around(session)
        images = session.taker.trajectory.renderer.images is not None  # a small one may be many pixels to decode
        if len(body) <= _SHORT_BYTES and not images:
            return read(body, around)
        asked: Exchange = await self.in_thread(read, body, around)
        return asked

    async def _check_text(self, session: Session, turn: TurnRequest, body: int) -> None:
        """Raises NoRoomError for a conversation that is too long without its images. ``body``: bytes of the request."""
        most = most_text(session.taker.limits.total)
        if body <= most:
            return
        size = len(await self.in_thread(msgspec.json.encode, [turn.messages, turn.tools]))
        if size > most:
            with session.request():
                raise NoRoomError(f"the conversation has {size} bytes without its images, more than {most}")

    async def _take(
        self, session: Session, asked: Exchange, streamed: Sequence[StreamedTurn] | None = None
    ) -> list[Turn]:
        each: Sequence[StreamedTurn | None] = streamed or [None] * asked.choices
        with session.request(asked.turn.messages) as outcome:
            turns = await gathered(*(session.taker.take(asked.turn, one) for one in each))
            outcome.cut = all(map(session.taker.limits.cut, turns))  # some agents fail for that alone
        self.counts["turns"] += len(turns)
        for turn in turns:
            self.counts["prompt_tokens"] += turn.sampled.prompt_tokens
            self.counts["cached_tokens"] += turn.sampled.cached_tokens
            self.counts["sampled_tokens"] += len(turn.sampled.output_ids)
        return turns

    async def _stream(
        self, request: web.Request, session: Session, asked: Exchange, writer: Writer
    ) -> web.StreamResponse:
        changed = asyncio.Event()
        streamed = [StreamedTurn(changed.set) for _ in range(asked.choices)]
        taking = asyncio.ensure_future(self._take(session, asked, streamed))
        try:
            await _begun(taking, changed)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            try:
                if opened := writer.opened():
                    await response.write(opened)
                turns = await written_meanwhile(response, writer, streamed, changed, taking)
            except MilesAsyncError as error:  # the status has been sent already
                await response.write(writer.failed(failure(error)[1]))
                return response
            await response.write(writer.ended(turns))
            return response
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)


async def _begun(taking: asyncio.Future[list[Turn]], changed: asyncio.Event) -> None:
    """Wait for the first token, as long as a client can do without a sign of life.

    Raises what ``taking`` raises until then, which clients understand by its status, and not in a stream.
    """
    waiting = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait((taking, waiting), timeout=_KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if taking.done():
        taking.result()


async def _body(request: web.Request, session: Session) -> bytes:
    try:
        images = session.taker.trajectory.renderer.images is not None
        return await read_conversation(request, session.taker.limits.total, images=images)
    except NoRoomError:
        with session.request():  # the trajectory ends for lack of room, as if it had been tokenized
            raise


async def written_meanwhile(
    response: web.StreamResponse,
    writer: Writer,
    streamed: Sequence[StreamedTurn],
    changed: asyncio.Event,
    answer: Awaitable[list[Turn]],
) -> list[Turn]:
    """Await the answer, one turn for each of ``streamed``, and write events meanwhile: ``Writer.waits`` if nothing is
    new for long.

    ``changed``: set when something may be new. Raises what ``answer`` raises.
    """

    async def write() -> None:
        written_at = now()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, _KEEP_ALIVE_SECONDS - (now() - written_at))):
                    await changed.wait()
            changed.clear()
            replies = ((index, turn.advance()) for index, turn in enumerate(streamed))
            events = b"".join(writer.wrote(index, reply) for index, reply in replies if reply is not None)
            if not events and now() - written_at >= _KEEP_ALIVE_SECONDS:
                events = writer.waits()
            if events:
                await response.write(events)
                written_at = now()
            await asyncio.sleep(_PAUSE_SECONDS)

    try:
        async with asyncio.TaskGroup() as scope:
            writing = scope.create_task(write())
            turns = await answer
            writing.cancel()
        return turns
    except BaseExceptionGroup as group:
        raise first_error(group) from None
