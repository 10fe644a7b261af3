"""Requests of Anthropic's Messages API, read into the messages and tools of chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from miles_async.errors import TrajectoryError
from miles_async.sessions.protocols.exchange import (
    Ignored,
    Kept,
    Surroundings,
    check_supported,
    content_of,
    effort_options,
    offered,
    parsed,
    stop_problems,
    texts,
)
from miles_async.trajectory.constraints import constraint_of
from miles_async.trajectory.messages import KeepImage
from miles_async.trajectory.taker import TurnRequest
from miles_async.types import JsonObject

UNPARSED = "unparsed_arguments"
"""Key of a call's input for arguments that are not an object, which an input has to be."""

_BILLING = "x-anthropic-billing-header:"  # begins a block of Claude Code's system prompt that differs at every request


class MessagesRequest(Ignored, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request. Fields that are neither here nor in its base class are refused by name."""

    messages: list[JsonObject]
    model: str = ""
    max_tokens: int | None = None  # required for a turn
    system: object = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    thinking: JsonObject | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    thread: JsonObject | None = None  # keep the conversation, or continue one that was kept
    output_config: JsonObject | None = None
    output_format: JsonObject | None = None  # earlier name of output_config.format
    # Without effect:
    top_k: object = None
    inference_geo: object = None
    speed: object = None
    betas: object = None
    cache_control: object = None
    context_management: object = None
    diagnostics: object = None

    @property
    def stops(self) -> list[str]:
        """Texts that end the turn; empty ones are ignored."""
        return [stop for stop in self.stop_sequences or () if stop]

    @property
    def continued(self) -> str | None:
        """Id of the answer that this request continues. Raises TrajectoryError."""
        match self.thread:
            case None | {"type": "create"}:
                return None
            case {"type": "continue", "previous_message_id": str(message_id)}:
                return message_id
        raise TrajectoryError(f"thread = {self.thread}: expected type create, or continue and a previous_message_id")

    def offered(self, before: Kept | None) -> Sequence[JsonObject]:
        """Tools in the form of chat completions: those of ``before`` stay. Raises TrajectoryError."""
        if self.tools is not None:
            return [_function(tool) for tool in self.tools]
        return before.tools if before else ()

    def turn(self, before: Kept | None, around: Surroundings) -> TurnRequest:
        """The turn that is asked for. Raises TrajectoryError.

        ``before``: the conversation that this request continues, whose system prompt and tools stay.
        """
        choice = self.tool_choice or {"type": "auto"}
        tools = () if choice.get("type") == "none" else self.offered(before)
        parallel = choice.get("disable_parallel_tool_use") is not True
        schema, called = self._schema(), _called(choice, tools)
        new = (each for message in self.messages for each in _chat_messages(message, around.keep_image))
        return TurnRequest(
            messages=[*(before.messages if before else ()), *_system(self.system), *new],
            tools=tools,
            options={
                **self._thinking(around),
                **effort_options((self.output_config or {}).get("effort"), around),
            },
            max_tokens=self.max_tokens,
            stops=self.stops,
            parallel_calls=parallel,
            constraint=constraint_of(called, schema, tools, parallel=parallel),
        )

    def _thinking(self, around: Surroundings) -> JsonObject:
        match self.thinking:
            case None:
                return {}
            case {"type": "enabled" | "adaptive"}:
                thinks = True
            case {"type": "disabled"}:
                thinks = False
            case _:
                raise TrajectoryError(f"thinking = {self.thinking}: expected type enabled, adaptive or disabled")
        return {"enable_thinking": thinks} if "enable_thinking" in around.variables else {}

    def _schema(self) -> JsonObject | None:
        """JSON Schema of the answer; None for free text."""
        match (self.output_config or {}).get("format") or self.output_format:
            case None:
                return None
            case {"type": "json_schema", "schema": Mapping() as schema}:
                return schema
            case other:
                raise TrajectoryError(f"output_config.format = {other}: expected type json_schema with a schema")


def read_request(body: bytes) -> MessagesRequest:
    """Parse a request for a turn. Raises TrajectoryError if it is malformed or asks for something unsupported."""
    request = read_counted(body)
    if request.max_tokens is None or request.max_tokens < 1:
        raise TrajectoryError(f"max_tokens: expected at least 1, found {request.max_tokens}")
    return request


def read_counted(body: bytes) -> MessagesRequest:
    """Parse a request that may lack ``max_tokens``, such as one that counts tokens. Raises TrajectoryError."""
    request = parsed(body, MessagesRequest, "a message")
    check_supported(stop_problems(request.stops, "stop_sequences"))
    return request


def _system(system: object) -> list[JsonObject]:
    if isinstance(system, list):
        system = [part for part in system if not texts([part], "system").startswith(_BILLING)]
    text = texts(system, "system")
    return [{"role": "system", "content": text}] if text else []


def _chat_messages(message: JsonObject, keep: KeepImage) -> list[JsonObject]:
    """Messages of chat completions for one message. Raises TrajectoryError."""
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        return [_assistant(_blocks(content))]
    if role == "system":
        return [{"role": "system", "content": texts(content, "messages of the system")}]
    if role != "user":
        raise TrajectoryError(f"expected messages of the roles user and assistant, found {role!r}")
    messages: list[JsonObject] = []
    for block in _blocks(content):
        match block:
            case {"type": "text", "text": str()} | {"type": "image", "source": {}}:
                said = content_of([block], "messages of the user", keep)
                if messages and messages[-1]["role"] == "user":
                    messages[-1] = {"role": "user", "content": _followed_by(messages[-1]["content"], said)}
                else:
                    messages.append({"role": "user", "content": said})
            case {"type": "tool_result", "tool_use_id": str(call), **result}:
                content = content_of(result.get("content"), "tool_result", keep)
                messages.append({"role": "tool", "content": content, "tool_call_id": call})
            case _:
                kind = _kind(block)
                raise TrajectoryError(f"expected text, image and tool_result blocks from the user, found {kind}")
    return messages


def _followed_by(content: str | list[JsonObject], more: str | list[JsonObject]) -> str | list[JsonObject]:
    if isinstance(content, str) and isinstance(more, str):
        return content + more
    both = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (content, more))
    return [part for parts in both for part in parts]


def _assistant(blocks: Sequence[object]) -> JsonObject:
    text, reasoning = "", ""
    calls: list[JsonObject] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(said)}:
                text += said
            case {"type": "thinking", "thinking": str(thought)}:
                reasoning += thought
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(call), "name": str(name), **rest}:
                function = {"name": name, "arguments": _arguments(rest.get("input"))}
                calls.append({"id": call, "type": "function", "function": function})
            case _:
                raise TrajectoryError(
                    f"expected text, thinking and tool_use blocks from the assistant, found {_kind(block)}"
                )
    message: dict[str, object] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(given: object) -> object:
    """Arguments of a call, as text where they are not an object; see ``UNPARSED``."""
    return json.dumps(given[UNPARSED]) if isinstance(given, Mapping) and [*given] == [UNPARSED] else given


def _blocks(content: object) -> Sequence[object]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise TrajectoryError(f"expected a text or a list of blocks as content, found {type(content).__name__}")


def _kind(block: object) -> str:
    """Type of a block, for errors."""
    return str(block.get("type"))[:100] if isinstance(block, Mapping) else type(block).__name__


def _function(tool: JsonObject) -> JsonObject:
    """A tool as chat completions have it. Raises TrajectoryError."""
    if tool.get("type") not in (None, "custom"):
        raise TrajectoryError(
            f"tools: {tool.get('type')} is a tool of Anthropic's servers or models; offer one with an input_schema"
        )
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), Mapping):
        raise TrajectoryError("tools: each needs a name and an input_schema")
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": tool["input_schema"]}}


def _called(choice: JsonObject, tools: Sequence[JsonObject]) -> Sequence[JsonObject]:
    """Tools one of which must be called; empty if calls are optional."""
    match choice:
        case {"type": "auto" | "none"}:
            return ()
        case {"type": "any"}:
            return offered(choice, tools)
        case {"type": "tool", "name": str(name)}:
            return offered(choice, tools, name)
    raise TrajectoryError(f"tool_choice = {choice}: expected type auto, any, none, or tool and its name")
