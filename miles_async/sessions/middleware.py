"""Middleware of the session server: keys, size limits, and errors as JSON.

The run's key opens everything, the agents' key what agents do. Rendering and tokenizing a text takes 130 times its size
in memory, in the one process of all sessions, so a request that is longer than any conversation that fits the context
is refused before it is read. Errors are a status and a JSON body that clients of OpenAI and of Anthropic read.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from miles_async.errors import (
    MilesAsyncError,
    NoRoomError,
    RequestRejectedError,
    StalledError,
    TrajectoryError,
    TransientEngineError,
)
from miles_async.runtime.network.keys import SessionKeys
from miles_async.types import JsonObject

log = structlog.get_logger(__name__)

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BYTES_PER_TOKEN = 32
"""Bytes of a request allowed per token of context. Text has 1 to 6, or 12 where JSON escapes it; ids come on top."""

IMAGE_BYTES = 1 << 25
"""Bytes that the images of a request may have on top, in base64, for a model that reads images."""

_ALWAYS = 1 << 16  # bytes that every request may have
_PIECE = 1 << 16
_OF_THE_RUN = ("/sessions", "/sessions/{id}/collect")  # routes: opening a session, and taking its sample

_STATUS_OF: tuple[tuple[type[MilesAsyncError], int, str], ...] = (
    (NoRoomError, 400, "context_length_exceeded"),
    (TrajectoryError, 400, "invalid_request_error"),
    (RequestRejectedError, 400, "engine_rejected"),
    (TransientEngineError, 503, "engine_unavailable"),
    (StalledError, 504, "engine_unavailable"),
    (MilesAsyncError, 500, "engine_error"),
)


def failure(error: MilesAsyncError) -> tuple[int, JsonObject]:
    """Status and body for an error. An upstream's own status and text are kept (A5)."""
    status, code = next((status, code) for kind, status, code in _STATUS_OF if isinstance(error, kind))
    if upstream := re.match(r"HTTP (\d{3}): ", str(error)):
        status = int(upstream[1])
    message = str(error)
    if isinstance(error, NoRoomError):  # the words by which Claude Code and LiteLLM know it
        message = f"prompt is too long: this model's maximum context length is exceeded: {error}"
    return status, problem(message, code, status)


def problem(message: str, code: str, status: int) -> JsonObject:
    """The body of an error, as clients of OpenAI and of Anthropic expect it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": code}}


def gone(kind: type[web.HTTPError], message: str, code: str) -> web.HTTPError:
    """Build an HTTP error with such a body, to be raised."""
    body = msgspec.json.encode(problem(message, code, kind.status_code)).decode()
    return kind(text=body, content_type="application/json")


@web.middleware
async def as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that turns every error into such a body."""
    try:
        return await handler(request)
    except MilesAsyncError as error:
        status, body = failure(error)
        return web.json_response(body, status=status)
    except web.HTTPError as error:
        if error.content_type == "application/json":
            raise
        what = f"{request.method} {request.path}: {error.reason}"
        return web.json_response(problem(what, "invalid_request_error", error.status), status=error.status)
    except ConnectionError:  # raised when writing to a client that has gone; aiohttp expects it
        raise
    except Exception as error:  # supervision point: an unforeseen request fails alone, not the server
        log.exception("request failed", method=request.method, path=request.path)
        return web.json_response(problem(repr(error), "internal_error", 500), status=500)


def locked(keys: SessionKeys) -> Middleware:
    """Middleware that answers 401 to requests without the key for their path."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        for_run = resource is not None and resource.canonical in _OF_THE_RUN
        opening = (keys.run,) if for_run else (keys.run, keys.agents)
        authorization, api_key = request.headers.get("Authorization"), request.headers.get("X-Api-Key", "")
        if not any(key.opens_for(authorization) or key.matches(api_key) for key in opening):
            expected = "the run's own key" if for_run else "the key that agents find in OPENAI_API_KEY"
            headers = "'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
            what = f"expected the header {headers} with {expected}, found none or another"
            raise gone(web.HTTPUnauthorized, what, "invalid_api_key")
        return await handler(request)

    return middleware


def most_text(max_total: int) -> int:
    """Bytes of a request with any conversation of ``max_total`` tokens, without images."""
    return _ALWAYS + BYTES_PER_TOKEN * max_total


async def read_conversation(request: web.Request, max_total: int, *, images: bool) -> bytes:
    """Read a body. Raises NoRoomError if it is longer than any conversation of ``max_total`` tokens.

    ``images``: there may be images in it.
    """
    limit = most_text(max_total) + IMAGE_BYTES * images
    body = bytearray()
    if (request.content_length or 0) <= limit:
        async for piece in request.content.iter_chunked(_PIECE):
            body += piece
            if len(body) > limit:
                break
        else:
            return bytes(body)
    on_top = f", and {IMAGE_BYTES} for images" if images else ""
    raise NoRoomError(
        f"the request has {request.content_length or f'more than {limit}'} bytes; the limit is {limit} for a "
        f"conversation of {max_total} tokens (--max-tokens-per-gpu), at {BYTES_PER_TOKEN} bytes per token{on_top}"
    )


async def read_object(request: web.Request, expected: str, kind: type[T]) -> T:
    """Read a short JSON object as a ``kind``; an empty body is an empty object.

    Raises TrajectoryError naming ``expected``.
    """
    if (request.content_length or 0) > _ALWAYS:
        raise TrajectoryError(f"expected {expected}, found {request.content_length} bytes")
    body = await request.read()
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrajectoryError(f"expected {expected}: {error}") from error
