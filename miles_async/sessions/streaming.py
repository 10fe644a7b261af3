"""Writes turns to an agent while they are sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from aiohttp import web

from miles_async.errors import first_error
from miles_async.runtime.clock import now
from miles_async.sessions.protocols.exchange import Writer
from miles_async.trajectory.context import Turn
from miles_async.trajectory.streamed import StreamedTurn

_KEEP_ALIVE_SECONDS = 15.0  # without an event before a comment is written
_PAUSE_SECONDS = 0.05  # between readings of a reply, each of which takes time in proportion to its length


async def written_meanwhile(
    response: web.StreamResponse,
    writer: Writer,
    streamed: Sequence[StreamedTurn],
    changed: asyncio.Event,
    answer: Awaitable[list[Turn]],
) -> list[Turn]:
    """Await the answer, one turn for each of ``streamed``, and write events meanwhile; comments if nothing is new for
    long, to keep proxies from closing the connection.

    ``changed``: set when something may be new. Raises what ``answer`` raises.
    """

    async def write() -> None:
        written_at = now()
        while True:
            await _set_within(changed, _KEEP_ALIVE_SECONDS - (now() - written_at))
            changed.clear()
            replies = ((index, turn.advance()) for index, turn in enumerate(streamed))
            events = b"".join(writer.wrote(index, reply) for index, reply in replies if reply is not None)
            if not events and now() - written_at >= _KEEP_ALIVE_SECONDS:
                events = b": generating\n\n"
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


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, or for as long."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        pass
