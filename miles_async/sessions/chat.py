"""Chat completions as OpenAI has them: requests, answers, streams and errors. No network here."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from miles_async.errors import (
    MilesAsyncError,
    NoRoomError,
    RequestRejectedError,
    StalledError,
    TrajectoryError,
    TransientEngineError,
)
from miles_async.trajectory.tree import Turn


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a request. Sampling parameters are the run's: the trainer's log-probs assume them."""

    messages: list[dict[str, Any]]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = 1
    logprobs: bool | None = False
    response_format: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        """More strings that end the turn."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """What the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []


def read_request(body: bytes) -> ChatRequest:
    """Raises TrajectoryError for what is no request, or asks for what there isn't."""
    try:
        request = msgspec.json.decode(body, type=ChatRequest)
    except msgspec.DecodeError as error:
        raise TrajectoryError(f"not a request for a chat completion: {error}") from error
    limit = request.max_completion_tokens or request.max_tokens
    problems = {
        f"n = {request.n}: one answer per request": request.n not in (None, 1),
        "logprobs: they are kept for the trainer": bool(request.logprobs),
        "response_format: answers are not constrained": request.response_format not in (None, {"type": "text"}),
        f"tool_choice = {request.tool_choice}: auto or none": request.tool_choice not in (None, "auto", "none"),
        f"max_tokens = {limit}: at least 1": limit is not None and limit < 1,
    }
    if unsupported := [problem for problem, found in problems.items() if found]:
        raise TrajectoryError(f"not supported: {'; '.join(unsupported)}")
    return request


def completion(turn: Turn, request: ChatRequest, completion_id: str) -> dict[str, Any]:
    """The answer in one piece."""
    message = _message(turn)
    return {
        **_head(request, completion_id, "chat.completion"),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(turn)}],
        "usage": _usage(turn),
    }


def stream(turn: Turn, request: ChatRequest, completion_id: str) -> Iterator[bytes]:
    """The same as server-sent events. Tokens come from engines all at once, so there is one event per part."""
    head = _head(request, completion_id, "chat.completion.chunk")
    message = _message(turn)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls", ()))]
    for delta in deltas:
        yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(turn)}]})
    if (request.stream_options or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": _usage(turn)})
    yield b"data: [DONE]\n\n"


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _head(request: ChatRequest, completion_id: str, kind: str) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": int(time.time()), "model": request.model}


def _message(turn: Turn) -> dict[str, Any]:
    message = dict(turn.reply)
    if calls := message.get("tool_calls"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [{**call, "function": _as_text(call["function"])} for call in calls]
    return message


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}


def _finish_reason(turn: Turn) -> str:
    if turn.sampled.finish_reason == "stop" and turn.reply.get("tool_calls"):
        return "tool_calls"
    return turn.sampled.finish_reason


def _usage(turn: Turn) -> dict[str, Any]:
    prompt, said = turn.context.length, len(turn.sampled.output_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": turn.sampled.cached_tokens},
    }


# ------------------------------------------------------------------------------------------------------ errors
_STATUS_OF: tuple[tuple[type[MilesAsyncError], int, str], ...] = (
    (NoRoomError, 400, "context_length_exceeded"),
    (TrajectoryError, 400, "invalid_request_error"),
    (RequestRejectedError, 400, "engine_rejected"),
    (TransientEngineError, 503, "engine_unavailable"),
    (StalledError, 504, "engine_unavailable"),
    (MilesAsyncError, 500, "engine_error"),
)


def failure(error: MilesAsyncError) -> tuple[int, dict[str, Any]]:
    """Status and body for an error. An upstream's own status and text are kept (C5)."""
    status, code = next((status, code) for kind, status, code in _STATUS_OF if isinstance(error, kind))
    if upstream := re.match(r"HTTP (\d{3}): ", str(error)):
        status = int(upstream[1])
    return status, problem(str(error), code)


def problem(message: str, code: str) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": code, "code": code}}
