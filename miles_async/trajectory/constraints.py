"""Constraints on a turn (JSON of a schema, calls of tools) as a grammar for the engine.

SGLang samples among the tokens that the grammar allows, so it returns the log-probs of the policy restricted to
these tokens, not of the policy alone. docs/agents.md describes the effect on the loss.

Source: XGrammar's structural tags, https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html (0.2.7).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from miles_async.errors import TrajectoryError
from miles_async.trajectory.context import Tools
from miles_async.trajectory.replies import THINK_TAGS
from miles_async.types import JsonObject

GRAMMAR = "structural_tag"
"""Name of SGLang's sampling parameter for a grammar."""

Format = JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """Restriction of a turn to one of the given alternatives."""

    schema: JsonObject | None = None  # a JSON text of this JSON Schema
    tools: Tools = ()  # calls of these functions, one at least
    parallel: bool = True  # several calls are allowed

    @property
    def schemas(self) -> list[object]:
        """JSON Schemas of all alternatives."""
        parameters = [tool.get("function", {}).get("parameters") for tool in self.tools]
        return [schema for schema in (self.schema, *parameters) if schema is not None]


def constraint_of(called: Tools, schema: JsonObject | None, tools: Tools, *, parallel: bool) -> Constraint | None:
    """The constraint of a request; None if it has none.

    ``called``: tools that must be called: then an answer consists of calls only. ``schema``: of the answer,
    unless it calls ``tools``.
    """
    if called:
        return Constraint(tools=called, parallel=parallel)
    return None if schema is None else Constraint(schema=schema, tools=tools, parallel=parallel)


def grammar(
    constraint: Constraint, before: str, *, call_style: str | None, reasoning_tags: tuple[str, str] | None
) -> str:
    """Build the value of ``GRAMMAR``.

    Args:
        constraint: the alternatives.
        before: what the template wrote in front of the turn, which may begin the reasoning, or begin and end it.
        call_style: how calls are written, a name of ``CALL_STYLES``.
        reasoning_tags: what begins and ends reasoning, which is free; None if a turn has none.

    Raises:
        TrajectoryError: calls are demanded in a format that is not known here.
    """
    said: list[Format] = []
    if constraint.schema is not None:
        said.append({"type": "json_schema", "json_schema": constraint.schema})
    if constraint.tools:
        said.append(_calls(constraint.tools, constraint.parallel, call_style))
    elements: list[Format] = said if len(said) == 1 else [{"type": "or", "elements": said}]
    written, (begin, end) = before.rstrip(), reasoning_tags or THINK_TAGS
    if written.endswith(begin):
        elements.insert(0, _reasoning("", end))
    elif reasoning_tags and not written.endswith(end):  # otherwise the template has closed it
        elements.insert(0, {"type": "optional", "content": _reasoning(begin, end)})
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})


def _reasoning(begin: str, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": f"{end}\n\n"}


def _calls(tools: Tools, parallel: bool, style: str | None) -> Format:
    if style is None or style not in CALL_STYLES:
        raise TrajectoryError(
            f"tool calls can only be made with a --tool-call-parser of {', '.join(CALL_STYLES)}; found "
            f"{style or 'none of these'}"
        )
    chosen, functions = CALL_STYLES[style], [tool.get("function", {}) for tool in tools]
    return {
        "type": "tags_with_separator",
        "tags": [_call(chosen, str(function.get("name")), function.get("parameters") or {}) for function in functions],
        "separator": chosen.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _call(style: CallStyle, name: str, parameters: object) -> Format:
    if not isinstance(parameters, Mapping):  # of an agent
        raise TrajectoryError(f"parameters of a tool: expected a JSON Schema, found {str(parameters)[:80]}")
    content = {"type": "json_schema", "json_schema": {"type": "object", **parameters}, **style.arguments}
    return {"type": "tag", "begin": style.begin(name), "content": content, "end": style.end}


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How calls are written."""

    begin: Callable[[str], str]  # of a call, up to the arguments, by the function's name
    end: str
    separator: str  # of two calls
    arguments: JsonObject = field(default_factory=dict)  # how XGrammar writes them, unless as JSON


CALL_STYLES: Mapping[str, CallStyle] = {
    "qwen": CallStyle(
        lambda name: f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>", "\n"
    ),
    "llama3": CallStyle(lambda name: f'{{"name": {json.dumps(name)}, "parameters": ', "}", "; "),
    "glm": CallStyle(lambda name: f"<tool_call>{name}\n", "\n</tool_call>", "\n", {"style": "glm_xml"}),
}
