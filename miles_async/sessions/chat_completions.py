"""The chat-completions protocol of OpenAI: requests are read into a ``TurnRequest``, turns are written as responses.

No network here. Another protocol is another file like this one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from miles_async.errors import TrajectoryError
from miles_async.trajectory.constraints import Constraint
from miles_async.trajectory.taker import TurnRequest
from miles_async.trajectory.tree import Turn
from miles_async.types import JsonObject

Decode = Callable[[Sequence[int]], str]
"""Tokens → text, special tokens included."""

_MOST_CHOICES = 128  # OpenAI's limit of n
_MOST_STOPS, _LONGEST_STOP = 16, 256  # engines look for every stop after each token; OpenAI's limit is 4 of them


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request that are honored. Sampling parameters are the run's: the trainer's log-probs assume them."""

    messages: list[JsonObject]
    model: str = ""
    tools: list[JsonObject] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = False
    stream_options: JsonObject | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = 1
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: object = None
    chat_template_kwargs: JsonObject | None = None

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens per answer; None if the request sets none."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def choices(self) -> int:
        """Number of answers requested."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        """Additional stop strings; empty ones are ignored."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    def turn(self) -> TurnRequest:
        """The turn that is asked for. Raises TrajectoryError for a constraint that is not supported."""
        tools = [] if self.tool_choice == "none" else self.tools or []  # shown to the model
        parallel = self.parallel_tool_calls is not False
        schema, called = _schema(self.response_format), self._called_tools()
        constraint = None
        if called:  # an answer consists of calls only
            constraint = Constraint(tools=called, parallel=parallel)
        elif schema is not None:
            constraint = Constraint(schema=schema, tools=tools, parallel=parallel)
        return TurnRequest(
            messages=self.messages,
            tools=tools,
            options=self.chat_template_kwargs or {},
            max_tokens=self.limit,
            stops=self.stops,
            parallel_calls=parallel,
            constraint=constraint,
        )

    def _called_tools(self) -> list[JsonObject]:
        """Tools of which ``tool_choice`` demands a call; empty if calls are optional."""
        match self.tool_choice:
            case None | "auto" | "none":
                return []
            case "required":
                called = self.tools or []
            case {"type": "function", "function": {"name": name}}:
                called = [tool for tool in self.tools or [] if _name(tool) == name]
            case _:
                raise TrajectoryError(
                    f"tool_choice = {self.tool_choice}: expected auto, none, required, or a function and its name"
                )
        if not called:
            raise TrajectoryError(f"tool_choice = {self.tool_choice}: no such tool is offered")
        return called


def read_request(body: bytes) -> ChatRequest:
    """Parse a request body. Raises TrajectoryError if it is malformed or asks for something unsupported."""
    try:
        request = msgspec.json.decode(body, type=ChatRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrajectoryError(f"not a request for a chat completion: {error}") from error
    problems = {
        f"n = {request.n}: from 1 to {_MOST_CHOICES}": not 1 <= request.choices <= _MOST_CHOICES,
        f"top_logprobs = {request.top_logprobs}: only the sampled token's is known": bool(request.top_logprobs),
        f"max_tokens = {request.limit}: at least 1": request.limit is not None and request.limit < 1,
        f"stop: at most {_MOST_STOPS} texts of at most {_LONGEST_STOP} characters": len(request.stops) > _MOST_STOPS
        or any(len(stop) > _LONGEST_STOP for stop in request.stops),
        "tools: each needs a function with a name": not all(
            isinstance(_name(tool), str) for tool in request.tools or []
        ),
    }
    if unsupported := [problem for problem, found in problems.items() if found]:
        raise TrajectoryError(f"not supported: {'; '.join(unsupported)}")
    return request


def _name(tool: JsonObject) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def _schema(response_format: object) -> JsonObject | None:
    """JSON Schema of the answer; None for free text."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return schema
    raise TrajectoryError(
        f"response_format = {response_format}: expected type text, json_object, or json_schema with a schema"
    )


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
