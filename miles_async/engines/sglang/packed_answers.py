"""In the server's process: packed answers to requests that ask for them (``answers.py``, ``scores.py``).

SGLang (0.5.23) writes its answers as JSON. The request that an answer belongs to is not at hand where that happens, so
a context variable of the request's task carries there how it is to be packed. An answer that cannot be packed stays as
it is. Events of a stream are packed where they are serialized, in a task that inherits the variable.

The text of a packed answer is decoded here from all tokens. SGLang's own text differs: it leaves out special tokens
and the stop token, and was decoded piece by piece.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from miles_async.engines.sglang.answers import DECODER, MEDIA_TYPE, PACK, TEXT_FROM, EventPacker, pack
from miles_async.engines.sglang.hooks import hook
from miles_async.engines.sglang.scores import PACK_SCORES, pack_scores
from miles_async.runtime.detokenize import decode_tokens, fingerprint

_pack: ContextVar[Callable[[object], bytes | None] | None] = ContextVar("pack", default=None)

_pack_event: ContextVar[EventPacker | None] = ContextVar("pack_event", default=None)

_SERVER = "sglang.srt.entrypoints.http_server"


def register() -> None:
    """Hook into the HTTP server that this process is about to start."""
    hook(f"{_SERVER}.serve_generate_request", _serve)
    hook(f"{_SERVER}.orjson_response", _respond)
    hook(f"{_SERVER}.dumps_json", _dump)


async def _serve(serve: Callable[..., Awaitable[Any]], generate: Any, request: Any) -> Any:
    body = await request.json()  # parsed before, and kept
    if body.get(PACK) is True and body.get("stream") is True:
        _pack_event.set(EventPacker(partial(_pack_answer, body)))
    elif body.get(PACK) is True:
        _pack.set(partial(_pack_answer, body))
    elif body.get(PACK_SCORES) is True:
        _pack.set(pack_scores)
    return await serve(generate, request)


def _respond(respond: Callable[..., Any], content: Any, *args: Any, **kwargs: Any) -> Any:
    packer = _pack.get()
    if packer is None or (packed := packer(content)) is None:
        return respond(content, *args, **kwargs)
    from fastapi.responses import Response

    return Response(packed, media_type=MEDIA_TYPE)


def _dump(dump: Callable[..., Any], content: Any, *args: Any, **kwargs: Any) -> Any:
    packer = _pack_event.get()
    return dump(content if packer is None else packer(content), *args, **kwargs)


def _pack_answer(body: Mapping[str, Any], content: Any) -> bytes | None:
    wanted = isinstance(body.get(DECODER), int) and isinstance(content, dict) and "output_ids" in content
    return pack(content, _text(body, content) if wanted else None)


def _text(body: Mapping[str, Any], reply: Mapping[str, Any]) -> str | None:
    """Decode the model's turn, its earlier chunks too. None if it continues, or if the client decodes otherwise."""
    try:
        if reply["meta_info"]["finish_reason"]["type"] == "abort" or _fingerprint() != body[DECODER]:
            return None
        return decode_tokens(_tokenizer(), [*body["input_ids"][body[TEXT_FROM] :], *reply["output_ids"]])
    except Exception:  # supervision point: a tokenizer of any origin; the client decodes the tokens itself, or fails
        return None


def _tokenizer() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager.tokenizer


@cache
def _fingerprint() -> int | None:
    return fingerprint(_tokenizer())
