"""Bodies of requests: read no further than what can be of use, and checked for what they are.

Rendering and tokenizing a text takes 130 times its size in memory, for all sessions in one process. So what is longer
than any conversation that fits is refused before it is even read.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from miles_async.errors import NoRoomError, TrajectoryError

BYTES_PER_TOKEN = 32
"""Of a request, for a token of the context. Text has 1 to 6, escaped as JSON up to 12; names and ids come on top."""

_ALWAYS = 1 << 16  # bytes that every request may have
_PIECE = 1 << 16


def most_bytes(max_total: int) -> int:
    """How long a request may be where conversations have ``max_total`` tokens at most."""
    return _ALWAYS + BYTES_PER_TOKEN * max_total


async def read_conversation(request: web.Request, max_total: int) -> bytes:
    """The body. Raises NoRoomError if it is longer than any conversation of ``max_total`` tokens."""
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


async def read_object(request: web.Request, expected: str, kind: Any) -> Any:
    """A short JSON object as a ``kind``, which may be empty. Raises TrajectoryError with what was ``expected``."""
    if (request.content_length or 0) > _ALWAYS:
        raise TrajectoryError(f"expected {expected}, found {request.content_length} bytes")
    body = await request.read()
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TrajectoryError(f"expected {expected}: {error}") from error
