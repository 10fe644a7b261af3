"""Parsers of replies for tests that need no others: those of SGLang take seconds to import.

tests/integration/test_reply_parsers.py compares them with SGLang's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from miles_async.trajectory.replies import Call, ParseCalls
from miles_async.types import JsonObject


def split_think(text: str, before: str) -> tuple[str | None, str]:
    """Split into (reasoning, rest). Without an end all is reasoning."""
    begun, stripped = before.rstrip().endswith("<think>"), text.lstrip()
    if not begun and not stripped.startswith("<think>"):
        return None, text
    reasoning, _, rest = stripped.removeprefix("<think>").partition("</think>")
    return reasoning.strip("\n"), rest.lstrip("\n")


def parse_qwen(text: str, tools: Sequence[JsonObject]) -> tuple[str, list[Call]]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen and Hermes write it."""
    calls: list[Call] = []

    def take(match: re.Match[str]) -> str:
        call = _json_call(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = re.sub(r"<tool_call>\s*(.*?)\s*</tool_call>", take, text, flags=re.DOTALL)
    return (rest.rstrip() if calls else rest), calls


def parse_llama3(text: str, tools: Sequence[JsonObject]) -> tuple[str, list[Call]]:
    """``{"name": ..., "parameters": {...}}``, the whole reply, several separated by semicolons."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    calls: list[Call] = []
    decoder = json.JSONDecoder()
    while body:
        try:
            _, end = decoder.raw_decode(body)
        except ValueError:
            return text, []
        call = _json_call(body[:end])
        if call is None:
            return text, []
        calls.append(call)
        body = body[end:].lstrip("; \n")
    return ("", calls) if calls else (text, [])


def parse_glm(text: str, tools: Sequence[JsonObject]) -> tuple[str, list[Call]]:
    """``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``, as GLM 4.5 and later write it."""
    types = {tool["function"]["name"]: _parameter_types(tool["function"]) for tool in tools if "function" in tool}
    calls: list[Call] = []

    def take(match: re.Match[str]) -> str:
        name = match[1].strip()
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", match[2], flags=re.DOTALL)
        arguments = {key.strip(): _value(value, types.get(name, {}).get(key.strip())) for key, value in pairs}
        calls.append((name, arguments))
        return ""

    rest = re.sub(r"<tool_call>([^<]*)(.*?)</tool_call>", take, text, flags=re.DOTALL)
    return (rest.rstrip() if calls else rest), calls


PARSERS: Mapping[str, ParseCalls] = {"qwen": parse_qwen, "llama3": parse_llama3, "glm": parse_glm}
"""Parsers by style."""

BEGINS: Mapping[str, Sequence[str]] = {
    "qwen": ("<tool_call>",),
    "llama3": ("<|python_tag|>", "{"),
    "glm": ("<tool_call>",),
}
"""What calls begin with."""


def _json_call(text: str) -> Call | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    return call["name"], {} if arguments is None else arguments  # null: a function without parameters


def _parameter_types(function: JsonObject) -> JsonObject:
    properties = (function.get("parameters") or {}).get("properties") or {}
    return {name: schema.get("type") for name, schema in properties.items() if isinstance(schema, Mapping)}


def _value(text: str, declared_type: object) -> object:
    """Parse a value that isn't declared as text as JSON, if possible."""
    if declared_type == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
