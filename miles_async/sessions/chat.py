"""OpenAI chat-completion responses, whole and streamed. No network here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from miles_async.sessions.chat_request import ChatRequest
from miles_async.trajectory.tree import Turn
from miles_async.types import JsonObject

Decode = Callable[[Sequence[int]], str]
"""Tokens → text, special tokens included."""


def completion(turns: Sequence[Turn], request: ChatRequest, completion_id: str, decode: Decode) -> JsonObject:
    """Build the response; one choice per turn."""
    choices = [
        {
            "index": index,
            "message": _message(turn),
            "logprobs": _logprobs(turn, request, decode),
            "finish_reason": _finish_reason(turn),
        }
        for index, turn in enumerate(turns)
    ]
    return {**_head(request, completion_id, "chat.completion"), "choices": choices, "usage": _usage(turns)}


def stream(turns: Sequence[Turn], request: ChatRequest, completion_id: str, decode: Decode) -> Iterator[bytes]:
    """The same as server-sent events. Tokens come from engines all at once, so there is one event per part."""
    head = _head(request, completion_id, "chat.completion.chunk")
    for index, turn in enumerate(turns):
        message = _message(turn)
        deltas: list[JsonObject] = [{"role": "assistant", "content": ""}]
        deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls", ()))]
        for delta in deltas:
            yield event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        logprobs = _logprobs(turn, request, decode)
        end = {"index": index, "delta": {}, "logprobs": logprobs, "finish_reason": _finish_reason(turn)}
        yield event({**head, "choices": [end]})
    if (request.stream_options or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": _usage(turns)})
    yield b"data: [DONE]\n\n"


def event(data: JsonObject) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _head(request: ChatRequest, completion_id: str, kind: str) -> JsonObject:
    return {"id": completion_id, "object": kind, "created": int(time.time()), "model": request.model}


def _message(turn: Turn) -> JsonObject:
    message = dict(turn.reply)
    if calls := message.get("tool_calls"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [{**call, "function": _as_text(call["function"])} for call in calls]
    return message


def _as_text(function: JsonObject) -> JsonObject:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}


def _finish_reason(turn: Turn) -> str:
    if turn.sampled.finish_reason == "stop" and turn.reply.get("tool_calls"):
        return "tool_calls"
    return turn.sampled.finish_reason


def _logprobs(turn: Turn, request: ChatRequest, decode: Decode) -> JsonObject | None:
    """Log-probs of all sampled tokens, including reasoning, calls and the stop token."""
    if not request.logprobs:
        return None
    ids, logprobs = turn.sampled.output_ids.tolist(), turn.sampled.logprobs.tolist()
    tokens = ((decode([token]), logprob) for token, logprob in zip(ids, logprobs, strict=True))
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in tokens
    ]
    return {"content": content, "refusal": None}


def _usage(turns: Sequence[Turn]) -> JsonObject:
    prompt, said = turns[0].context.length, sum(len(turn.sampled.output_ids) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": turns[0].sampled.cached_tokens},
    }
