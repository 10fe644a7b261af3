"""Calls of tools: the tiny model writes them ``<call>17*23</call>``, for the one tool that it is offered; environments
read and answer them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def parse_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, Any]]]:
    """``--tool-call-parser examples.tool_model.calls:parse_calls``."""
    function = tools[0]["function"]
    (parameter,) = function["parameters"]["properties"]
    calls = [(function["name"], {parameter: argument}) for argument in re.findall(r"<call>(.*?)</call>", text)]
    return (re.sub(r"<call>.*?</call>", "", text) if calls else text), calls


def argument(call: Mapping[str, Any], name: str) -> str:
    """An argument of a call; empty if the call lacks it, or has no object of arguments: models write anything."""
    arguments = call["function"]["arguments"]
    return str(arguments.get(name, "")) if isinstance(arguments, Mapping) else ""


def result(call: Mapping[str, Any], content: str) -> dict[str, Any]:
    """The answer to a call, as a message."""
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    """A tool with one parameter, a text, as chat completions describe it."""
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
