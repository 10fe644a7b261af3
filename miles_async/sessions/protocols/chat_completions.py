"""The chat-completions protocol of OpenAI."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles_async.sessions.protocols.exchange import (
    Decode,
    Delta,
    Exchange,
    IgnoredOfOpenAI,
    Progress,
    Surroundings,
    answer_schema,
    called_tools,
    check_supported,
    effort_options,
    parsed,
    sse,
    stop_problems,
)
from miles_async.trajectory.constraints import constraint_of
from miles_async.trajectory.context import Turn
from miles_async.trajectory.messages import Message, with_kept_images, with_text_arguments
from miles_async.trajectory.taker import TurnRequest
from miles_async.types import JsonObject

_MOST_CHOICES = 128  # OpenAI's limit of n


class ChatRequest(IgnoredOfOpenAI, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request. Fields that are neither here nor in its base class are refused by name."""

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
    reasoning_effort: object = None
    modalities: object = None
    chat_template_kwargs: JsonObject | None = None
    # Without effect:
    top_k: object = None
    min_p: object = None
    presence_penalty: object = None
    frequency_penalty: object = None
    repetition_penalty: object = None
    logit_bias: object = None
    seed: object = None
    store: object = None
    prediction: object = None
    verbosity: object = None

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

    def turn(self, around: Surroundings) -> TurnRequest:
        """The turn that is asked for. Raises TrajectoryError for a constraint that is not supported, or an image."""
        tools = [] if self.tool_choice == "none" else self.tools or []  # shown to the model
        parallel = self.parallel_tool_calls is not False
        schema, called = answer_schema(self.response_format, "response_format"), called_tools(self.tool_choice, tools)
        return TurnRequest(
            messages=[with_kept_images(message, around.keep_image) for message in self.messages],
            tools=tools,
            options={**effort_options(self.reasoning_effort, around), **(self.chat_template_kwargs or {})},
            max_tokens=self.limit,
            stops=self.stops,
            parallel_calls=parallel,
            constraint=constraint_of(called, schema, tools, parallel=parallel),
        )


def read(body: bytes, around: Surroundings) -> Exchange:
    """Read a request. Raises TrajectoryError if it is malformed or asks for something unsupported."""
    request = read_request(body)
    answer = _Answer(request, f"chatcmpl-{around.answer_id}", around.decode)
    return Exchange(
        turn=request.turn(around),
        answer=answer.whole,
        writer=_ChatWriter(answer) if request.stream else None,
        choices=request.choices,
    )


def read_request(body: bytes) -> ChatRequest:
    """Parse a request body. Raises TrajectoryError as :func:`read` does."""
    request = parsed(body, ChatRequest, "a chat completion")
    check_supported(
        {
            f"n = {request.n}: from 1 to {_MOST_CHOICES}": not 1 <= request.choices <= _MOST_CHOICES,
            f"top_logprobs = {request.top_logprobs}: only the sampled token's is known": bool(request.top_logprobs),
            f"max_tokens = {request.limit}: at least 1": request.limit is not None and request.limit < 1,
            f"modalities = {request.modalities}: text alone": request.modalities not in (None, ["text"]),
            "tools: each needs a function with a name": not all(
                isinstance(_name(tool), str) for tool in request.tools or []
            ),
            **stop_problems(request.stops, "stop"),
        }
    )
    return request


def _name(tool: JsonObject) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer, and the parts that it is made of."""

    request: ChatRequest
    completion_id: str
    decode: Decode

    def whole(self, turns: Sequence[Turn]) -> JsonObject:
        """Build the response; one choice per turn."""
        choices = [{"index": index, "message": _message(turn), **self.ending(turn)} for index, turn in enumerate(turns)]
        return {**self.head("chat.completion"), "choices": choices, "usage": _usage(turns)}

    def head(self, kind: str) -> JsonObject:
        return {"id": self.completion_id, "object": kind, "created": int(time.time()), "model": self.request.model}

    def ending(self, turn: Turn) -> JsonObject:
        """Why a turn ended, and if asked for the log-probs of all its tokens: reasoning, calls and the stop, too."""
        reason = turn.sampled.finish_reason
        calls = reason == "stop" and turn.reply.get("tool_calls")
        return {"logprobs": self._logprobs(turn), "finish_reason": "tool_calls" if calls else reason}

    def _logprobs(self, turn: Turn) -> JsonObject | None:
        if not self.request.logprobs:
            return None
        ids, logprobs = turn.sampled.output_ids.tolist(), turn.sampled.logprobs.tolist()
        tokens = ((self.decode([token]), logprob) for token, logprob in zip(ids, logprobs, strict=True))
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in tokens
        ]
        return {"content": content, "refusal": None}


class _ChatWriter:
    """Writes chunks."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._head = answer.head("chat.completion.chunk")
        self._progress: defaultdict[int, Progress] = defaultdict(Progress)  # by choice

    def opened(self) -> bytes:
        return b""

    def waits(self) -> bytes:
        return b": generating\n\n"

    def wrote(self, index: int, reply: Message) -> bytes:
        begins = index not in self._progress
        deltas: list[JsonObject] = [{"role": "assistant", "content": ""}] if begins else []
        deltas += map(_delta, self._progress[index].advance(reply))
        choices = ({"index": index, "delta": delta, "finish_reason": None} for delta in deltas)
        return b"".join(sse({**self._head, "choices": [choice]}) for choice in choices)

    def ended(self, turns: Sequence[Turn]) -> bytes:
        events = b""
        for index, turn in enumerate(turns):
            end = {"index": index, "delta": {}, **self._answer.ending(turn)}
            events += self.wrote(index, turn.reply) + sse({**self._head, "choices": [end]})
        if (self._answer.request.stream_options or {}).get("include_usage"):
            events += sse({**self._head, "choices": [], "usage": _usage(turns)})
        return events + b"data: [DONE]\n\n"

    def failed(self, error: JsonObject) -> bytes:
        return sse(error)


def _delta(new: Delta) -> JsonObject:
    match new.kind:
        case "reasoning":
            return {"reasoning_content": new.text}
        case "content":
            return {"content": new.text}
        case "call":
            return {"tool_calls": [{"index": new.number, **with_text_arguments(new.call)}]}


def _message(turn: Turn) -> JsonObject:
    message = dict(turn.reply)
    if calls := message.get("tool_calls"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [with_text_arguments(call) for call in calls]
    return message


def _usage(turns: Sequence[Turn]) -> JsonObject:
    prompt, said = turns[0].context.length, sum(len(turn.sampled.output_ids) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": min(turns[0].sampled.cached_tokens, prompt)},
    }
