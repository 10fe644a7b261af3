"""Reading of request bodies, within limits.

Rendering and tokenizing a text takes 130 times its size in memory, in the one process of all sessions. A request that
is longer than any conversation that fits the context is therefore refused before it is read.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from miles_async.errors import NoRoomError, TrajectoryError

T = TypeVar("T")

BYTES_PER_TOKEN = 32
"""Bytes of a request allowed per token of context. Text has 1 to 6, or 12 where JSON escapes it; ids come on top."""

_ALWAYS = 1 << 16  # bytes that every request may have
_PIECE = 1 << 16


def most_bytes(max_total: int) -> int:
    """Size limit of a request, in bytes, for a context of ``max_total`` tokens."""
    return _ALWAYS + BYTES_PER_TOKEN * max_total


async def read_conversation(request: web.Request, max_total: int) -> bytes:
    """Read a body. Raises NoRoomError if it is longer than any conversation of ``max_total`` tokens."""
    limit = most_bytes(max_total)
    body = bytearray()
    if (request.content_length or 0) <= limit:
        async for piece in request.content.iter_chunked(_PIECE):
            body += piece
            if len(body) > limit:
                break
        else:
            return bytes(body)
    raise NoRoomError(
        f"the request has {request.content_length or f'more than {limit}'} bytes, and {limit} are the most for a "
        f"conversation of {max_total} tokens (--max-tokens-per-gpu), at {BYTES_PER_TOKEN} bytes per token"
    )


async def read_object(request: web.Request, expected: str, kind: type[T]) -> T:
    """Read a short JSON object as a ``kind``; an empty body is an empty object.

    Raises TrajectoryError naming what was ``expected``.
    """
    if (request.content_length or 0) > _ALWAYS:
        raise TrajectoryError(f"expected {expected}, found {request.content_length} bytes")
    body = await request.read()
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrajectoryError(f"expected {expected}: {error}") from error
