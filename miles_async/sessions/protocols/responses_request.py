"""Requests of OpenAI's Responses API, read into the messages and tools of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_async.errors import TrajectoryError
from miles_async.sessions.protocols.exchange import (
    IgnoredOfOpenAI,
    Surroundings,
    answer_schema,
    called_tools,
    check_supported,
    content_of,
    effort_options,
    parsed,
    texts,
)
from miles_async.trajectory.constraints import constraint_of
from miles_async.trajectory.replies import CALL_ID
from miles_async.trajectory.taker import TurnRequest
from miles_async.types import JsonObject

FREE_TEXT = "input"
"""The one argument of a custom tool, whose calls have a text instead of JSON."""

_ITEMS_OF_THE_MODEL = ("reasoning", "function_call", "custom_tool_call")


class ResponsesRequest(IgnoredOfOpenAI, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request. Fields that are neither here nor in its base class are refused by name."""

    input: str | list[JsonObject] = ""
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    tools: list[JsonObject] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = False
    max_output_tokens: int | None = None
    reasoning: JsonObject | None = None
    text: JsonObject | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    # Without effect, but for log-probs, which ``include`` may not ask for:
    include: object = None
    truncation: object = None
    max_tool_calls: object = None
    stream_options: object = None
    client_metadata: object = None

    @property
    def functions(self) -> list[JsonObject]:
        """Tools, including tools of namespaces, as chat completions have them. Raises TrajectoryError."""
        functions = [_function(tool) for tool, _ in self._each_tool()]
        names = [function["function"]["name"] for function in functions]
        if twice := {name for name in names if names.count(name) > 1}:
            raise TrajectoryError(f"tools: expected one of each name, found several {', '.join(sorted(twice))}")
        return functions

    @property
    def namespaces(self) -> dict[str, str]:
        """Namespaces by names of tools in them."""
        return {str(tool.get("name")): namespace for tool, namespace in self._each_tool() if namespace}

    @property
    def free_text_tools(self) -> frozenset[str]:
        """Names of custom tools."""
        return frozenset(str(tool.get("name")) for tool, _ in self._each_tool() if tool.get("type") == "custom")

    def _each_tool(self) -> Iterator[tuple[JsonObject, str]]:
        """Yield (tool, its namespace or ""). Raises TrajectoryError."""
        for tool in self.tools or []:
            match tool:
                case {"type": "namespace", "name": str(namespace), "tools": list(tools)}:
                    yield from ((each, namespace) for each in tools if isinstance(each, Mapping))
                case _:
                    yield tool, ""

    def turn(self, before: Sequence[JsonObject], around: Surroundings) -> TurnRequest:
        """The turn that is asked for. Raises TrajectoryError.

        ``before``: messages up to the response that this request continues, without its instructions.
        """
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        tools = [] if self.tool_choice == "none" else self.functions
        parallel = self.parallel_tool_calls is not False
        schema = answer_schema((self.text or {}).get("format"), "text.format")
        return TurnRequest(
            messages=[*instructions, *with_items(before, items, around)],
            tools=tools,
            options=effort_options((self.reasoning or {}).get("effort"), around),
            max_tokens=self.max_output_tokens,
            parallel_calls=parallel,
            constraint=constraint_of(called_tools(self.tool_choice, tools), schema, tools, parallel=parallel),
        )


def read_request(body: bytes) -> ResponsesRequest:
    """Parse a request. Raises TrajectoryError if it is malformed or asks for something unsupported."""
    request = parsed(body, ResponsesRequest, "a response")
    limit = request.max_output_tokens
    included = request.include if isinstance(request.include, list) else []
    check_supported(
        {
            f"max_output_tokens = {limit}: at least 1": limit is not None and limit < 1,
            f"top_logprobs = {request.top_logprobs}: only the sampled token's is known": bool(request.top_logprobs),
            "background: a response ends with its request": bool(request.background),
            "include = message.output_text.logprobs: ask for a chat completion": "message.output_text.logprobs"
            in included,
        }
    )
    return request


def with_items(before: Sequence[JsonObject], items: Sequence[JsonObject], around: Surroundings) -> list[JsonObject]:
    """Messages ``before``, then the items' messages: the model's items between two inputs are one message.

    Raises TrajectoryError.
    """
    messages = [*before]
    for item in items:
        kind = item.get("type", "message")
        if kind in _ITEMS_OF_THE_MODEL or (kind == "message" and item.get("role") == "assistant"):
            _add(messages, item, kind, around)
        elif kind == "message":
            content = content_of(item.get("content"), "input", around.keep_image)
            messages.append({"role": item.get("role"), "content": content})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            result = content_of(item.get("output"), kind, around.keep_image)
            messages.append({"role": "tool", "content": result, "tool_call_id": item.get("call_id")})
        else:
            raise TrajectoryError(
                f"input: expected messages, reasoning, function_call, custom_tool_call and their outputs; found an "
                f"item of type {str(kind)[:100]}"
            )
    return messages


def _add(messages: list[JsonObject], item: JsonObject, kind: object, around: Surroundings) -> None:
    """Add an item of the model to its message, a new one if there is none."""
    place = _place(messages, item)
    message: dict[str, Any] = dict(messages[place]) if place < len(messages) else {"role": "assistant", "content": ""}
    match kind:
        case "message":
            message["content"] += texts(item.get("content"), "input")
        case "reasoning":
            message["reasoning_content"] = message.get("reasoning_content", "") + _reasoning(item)
        case _:
            message["tool_calls"] = [*message.get("tool_calls", ()), _call(item, kind, around)]
    messages[place : place + 1] = [message]


def _place(messages: Sequence[JsonObject], item: JsonObject) -> int:
    """Index of the message that an item belongs to; one past the end for a new one.

    An agent may put the output of a call in front of the turn's next call. Our ids begin with the id of their turn; ids
    that a model wrote don't show it.
    """
    place = len(messages)
    while place > 0 and messages[place - 1]["role"] == "tool":
        place -= 1
    if place == 0 or messages[place - 1]["role"] != "assistant":
        return len(messages)
    calls = messages[place - 1].get("tool_calls", ())
    call_id = str(item.get("call_id"))
    same_turn = call_id.startswith(CALL_ID) and any(call_id[:-2] == str(call["id"])[:-2] for call in calls)
    return place - 1 if place == len(messages) or same_turn else len(messages)


def _reasoning(item: JsonObject) -> str:
    content = item.get("content")  # its summary, if it has one, is not what the model wrote
    return texts(content, "reasoning") if content else ""


def _call(item: JsonObject, kind: object, around: Surroundings) -> JsonObject:
    call_id, arguments = item.get("call_id"), item.get("arguments")
    if kind == "custom_tool_call":
        text = item.get("input")
        arguments = text if (str(call_id), str(text)) in around.history.odd_inputs else {FREE_TEXT: text}
    return {"id": call_id, "type": "function", "function": {"name": item.get("name"), "arguments": arguments}}


def _function(tool: JsonObject) -> JsonObject:
    """A tool as chat completions have it. Raises TrajectoryError."""
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom"):
        raise TrajectoryError(f"tools: {kind} is a tool of OpenAI's servers; offer one of type function or custom")
    if not isinstance(name, str):
        raise TrajectoryError("tools: each needs a name")
    described = {"description": tool["description"]} if tool.get("description") else {}
    parameters = tool.get("parameters")
    if kind == "custom":
        parameters = {"type": "object", "properties": {FREE_TEXT: {"type": "string"}}, "required": [FREE_TEXT]}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {}}}
