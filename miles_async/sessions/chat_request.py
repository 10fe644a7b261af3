"""Parsing and validation of OpenAI chat-completion requests."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from miles_async.errors import TrajectoryError
from miles_async.trajectory.constraints import Constraint
from miles_async.types import JsonObject

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

    @property
    def offered_tools(self) -> list[JsonObject]:
        """Tools shown to the model."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def parallel_calls(self) -> bool:
        """True if an answer may have several calls."""
        return self.parallel_tool_calls is not False

    @property
    def constraint(self) -> Constraint | None:
        """Constraint set by ``response_format`` and ``tool_choice``. Raises TrajectoryError if one is not supported."""
        schema, called = _schema(self.response_format), self._called_tools()
        if schema is None and not called:
            return None
        if called:  # an answer consists of calls only
            return Constraint(tools=called, parallel=self.parallel_calls)
        return Constraint(schema=schema, tools=self.offered_tools, parallel=self.parallel_calls)

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
