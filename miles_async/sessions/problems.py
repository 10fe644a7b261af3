"""OpenAI-style errors: a status and a JSON body."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from aiohttp import web

from miles_async.errors import (
    MilesAsyncError,
    NoRoomError,
    RequestRejectedError,
    StalledError,
    TrajectoryError,
    TransientEngineError,
)
from miles_async.types import JsonObject

log = structlog.get_logger(__name__)

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
    return status, problem(str(error), code, status)


def problem(message: str, code: str, status: int) -> JsonObject:
    """The body of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def gone(kind: type[web.HTTPError], message: str, code: str) -> web.HTTPError:
    """Build an HTTP error with such a body, to be raised."""
    body = msgspec.json.encode(problem(message, code, kind.status_code)).decode()
    return kind(text=body, content_type="application/json")


@web.middleware
async def as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
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
