"""A request in any protocol, read: the turn that it asks for, and how the answer is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import msgspec

from miles_async.errors import TrajectoryError
from miles_async.trajectory.context import Turn, conversation_to
from miles_async.trajectory.messages import KeepImage, Message, as_sent, no_images
from miles_async.trajectory.taker import TurnRequest
from miles_async.types import JsonObject

T = TypeVar("T")

Decode = Callable[[Sequence[int]], str]
"""Tokens → text, special tokens included."""

MOST_STOPS, LONGEST_STOP = 16, 256  # engines look for every stop after each token; OpenAI's limit is 4 of them


class Ignored(msgspec.Struct, frozen=True, kw_only=True):
    """Fields without effect: sampling parameters are the run's, which the trainer's log-probs assume."""

    temperature: object = None
    top_p: object = None
    metadata: object = None
    service_tier: object = None


class IgnoredOfOpenAI(Ignored, frozen=True, kw_only=True):
    """The fields without effect of both OpenAI protocols."""

    user: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None
    prompt_cache_retention: object = None


class Writer(Protocol):
    """Writes one answer as server-sent events."""

    def opened(self) -> bytes:
        """Return the events before the first token."""
        ...

    def waits(self) -> bytes:
        """Return what says to proxies, and to clients that count events, that the answer is under way."""
        ...

    def wrote(self, index: int, reply: Message) -> bytes:
        """Return events for the new parts of answer number ``index``."""
        ...

    def ended(self, turns: Sequence[Turn]) -> bytes:
        """Return the remaining events."""
        ...

    def failed(self, error: JsonObject) -> bytes:
        """Return the event that ends a stream without an answer. ``error``: see ``middleware.failure``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A conversation up to an answer, for requests that name the answer and send only new messages.

    Turns share their messages, which requests that send the whole conversation repeat each time.
    """

    turn: Turn
    skipped: int = 0  # messages at its beginning that later requests don't continue
    tools: Sequence[JsonObject] = ()  # of the request

    @property
    def messages(self) -> list[JsonObject]:
        """Messages in the form of chat completions, the answer included."""
        return [as_sent(message) for message in conversation_to(self.turn)[self.skipped :]]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """A session's earlier answers, which later requests refer to."""

    conversations: dict[str, Kept] = field(default_factory=dict)  # by the id of the answer at their end
    odd_inputs: set[tuple[str, str]] = field(default_factory=set)
    """(id of a call, arguments as text) where the model called a custom tool with something else than its one text."""

    def conversation(self, answer_id: str, field: str) -> Kept:
        """The conversation that an answer ended. Raises TrajectoryError naming the field of the request."""
        if answer_id not in self.conversations:
            raise TrajectoryError(f"{field} = {answer_id[:100]}: this session has kept no such answer")
        return self.conversations[answer_id]


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """Context for reading a request."""

    answer_id: str  # unique in the session
    decode: Decode
    variables: frozenset[str] = frozenset()  # of the chat template, that requests may set
    history: History = field(default_factory=History)
    keep_image: KeepImage = no_images


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A request, and how its answer is written."""

    turn: TurnRequest
    answer: Callable[[Sequence[Turn]], JsonObject]  # the body of a response that is not streamed
    writer: Writer | None  # None: not streamed
    choices: int = 1  # number of answers, each a turn


Read = Callable[[bytes, Surroundings], Exchange]
"""A protocol. Raises TrajectoryError for a request that is malformed or asks for something unsupported."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of a reply that was not written yet."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    number: int = 0  # of the call
    call: JsonObject = field(default_factory=dict)


@dataclass(slots=True)
class Progress:
    """How much of a reply was written."""

    reasoning: int = 0  # characters
    content: int = 0
    calls: int = 0

    def advance(self, reply: Message) -> Iterator[Delta]:
        """Yield new parts: reasoning, then content, then calls."""
        reasoning, content, calls = reply.get("reasoning_content", ""), reply["content"], reply.get("tool_calls", ())
        if len(reasoning) > self.reasoning:
            yield Delta("reasoning", reasoning[self.reasoning :])
        if len(content) > self.content:
            yield Delta("content", content[self.content :])
        for number in range(self.calls, len(calls)):
            yield Delta("call", number=number, call=calls[number])
        self.reasoning, self.content, self.calls = len(reasoning), len(content), len(calls)


def parsed(body: bytes, kind: type[T], name: str) -> T:
    """Parse a body. Raises TrajectoryError that names an unknown field. ``name``: of the expected body."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrajectoryError(f"not a request for {name}: {error}") from error


def check_supported(problems: Mapping[str, bool]) -> None:
    """Raises TrajectoryError listing all problems."""
    if unsupported := [problem for problem, found in problems.items() if found]:
        raise TrajectoryError(f"not supported: {'; '.join(unsupported)}")


def stop_problems(stops: Sequence[str], name: str) -> dict[str, bool]:
    """Limits on texts that end a turn, for :func:`check_supported`. ``name``: of the field."""
    too_much = len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops)
    return {f"{name}: at most {MOST_STOPS} texts of at most {LONGEST_STOP} characters": too_much}


def effort_options(effort: object, around: Surroundings) -> JsonObject:
    """Options of the chat template for an effort of reasoning; none where the template doesn't know one."""
    known = effort is not None and "reasoning_effort" in around.variables
    return {"reasoning_effort": effort} if known else {}


def called_tools(choice: object, tools: Sequence[JsonObject]) -> Sequence[JsonObject]:
    """Tools one of which must be called, by OpenAI's ``tool_choice``; empty if calls are optional. Raises
    TrajectoryError.
    """
    match choice:
        case None | "auto" | "none":
            return ()
        case "required":
            return offered(choice, tools)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function" | "custom", "name": str(name)}:
            return offered(choice, tools, name)
    raise TrajectoryError(f"tool_choice = {choice}: expected auto, none, required, or a function and its name")


def offered(choice: object, tools: Sequence[JsonObject], name: str | None = None) -> Sequence[JsonObject]:
    """The tools that a ``tool_choice`` means: the one of a name, or all. Raises TrajectoryError if there are none."""
    called = [tool for tool in tools if name in (None, tool["function"]["name"])]
    if not called:
        raise TrajectoryError(f"tool_choice = {choice}: no such tool is offered")
    return called


def answer_schema(format: object, field: str) -> JsonObject | None:
    """JSON Schema of the answer, by the format in a field of OpenAI's requests; None for free text. Raises
    TrajectoryError naming the field.
    """
    match format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return schema
        case {"type": "json_schema", "schema": Mapping() as schema}:
            return schema
    raise TrajectoryError(f"{field} = {format}: expected type text, json_object, or json_schema with a schema")


def texts(content: object, where: str) -> str:
    """Join the texts of a message's content: a text, or a list of parts with ``text``. Raises TrajectoryError naming
    another type of part.
    """
    if content is None or isinstance(content, str):
        return content or ""
    joined = ""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TrajectoryError(f"{where}: expected text, found a part of type {kind}")
        joined += text
    return joined


def content_of(content: object, where: str, keep: KeepImage) -> str | list[JsonObject]:
    """The text of a message's content, or its parts if it has images. Raises TrajectoryError as :func:`texts` does."""
    parts = content if isinstance(content, list) else [content]
    urls = [_image_url(part) for part in parts]
    if not any(url is not None for url in urls):
        return texts(content, where)
    return [
        {"type": "text", "text": texts([part], where)} if url is None else {"type": "image", "image": keep(url)}
        for part, url in zip(parts, urls, strict=True)
    ]


def _image_url(part: object) -> str | None:
    """URL of an image of the Responses or the Messages API."""
    match part:
        case {"type": "input_image", "image_url": str(url)}:
            return url
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return url
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return f"data:{kind};base64,{data}"
    return None


def sse(data: JsonObject, event: str = "") -> bytes:
    """One server-sent event."""
    head = b"" if not event else b"event: " + event.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
