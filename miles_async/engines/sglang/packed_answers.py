"""In the server's process: packed answers to requests that ask for them (``answers.py``, ``scores.py``).

SGLang (0.5.23) writes its answers as JSON. The request that an answer belongs to is not at hand where that happens, so
a context variable of the request's task carries its wish there. An answer that cannot be packed stays as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Literal

from miles_async.engines.sglang.answers import MEDIA_TYPE, PACK, pack
from miles_async.engines.sglang.scores import PACK_SCORES, pack_scores

_wanted: ContextVar[Literal["answer", "scores"] | None] = ContextVar("packed", default=None)

_SERVER = "sglang.srt.entrypoints.http_server"


def register() -> None:
    """Hook into the HTTP server that this process is about to start."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_SERVER}.serve_generate_request", _serve, HookType.AROUND)
    HookRegistry.register(f"{_SERVER}.orjson_response", _respond, HookType.AROUND)


async def _serve(serve: Callable[..., Awaitable[Any]], generate: Any, request: Any) -> Any:
    body = await request.json()  # parsed before, and kept
    _wanted.set("answer" if body.get(PACK) is True else "scores" if body.get(PACK_SCORES) is True else None)
    return await serve(generate, request)


def _respond(respond: Callable[..., Any], content: Any, *args: Any, **kwargs: Any) -> Any:
    match _wanted.get():
        case "answer":
            packed = pack(content)
        case "scores":
            packed = pack_scores(content)
        case None:
            packed = None
    if packed is None:
        return respond(content, *args, **kwargs)
    from fastapi.responses import Response

    return Response(packed, media_type=MEDIA_TYPE)
