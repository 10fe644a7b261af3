"""Parse replies of a model into reasoning, content and tool calls, in the form of chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_async.trajectory.messages import Message
from miles_async.trajectory.rendering import ChatFormat
from miles_async.types import JsonObject

Call = tuple[str, object]
"""Name and arguments; arguments are an object, or the model's text if it is not one."""


class ParseCalls(Protocol):
    """``--tool-call-parser``."""

    def __call__(self, text: str, tools: Sequence[JsonObject]) -> tuple[str, list[Call]]:
        """Return (text without the calls, calls). Calls that cannot be parsed stay in the text."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyParser:
    """Reads replies. Both steps are optional."""

    chat: ChatFormat
    parse_calls: ParseCalls | None = None
    splits_reasoning: bool = False
    call_style: str | None = None  # a name of PARSERS, if calls are written in one of these ways

    def reply(
        self,
        text: str,
        before: str,
        tools: Sequence[JsonObject],
        call_ids: str,
        *,
        stops: Sequence[str] = (),
        parallel: bool = True,
    ) -> Message:
        """Build the assistant's message.

        Args:
            text: what was sampled, without the tokens that bound it.
            before: text of the template in front of it, which may begin the reasoning.
            tools: that were offered; nothing is read as a call without them.
            call_ids: what the ids of tool calls begin with.
            stops: texts that end the turn, and are not part of the message.
            parallel: the message may have several calls; else it has the first one.
        """
        text, reasoning = _until(text, stops), None
        if self.splits_reasoning:
            reasoning, text = split_reasoning(text, begun=before.rstrip().endswith("<think>"))
        calls: list[Call] = []
        if tools and self.parse_calls is not None:
            text, calls = self.parse_calls(text, tools)
            calls = calls if parallel else calls[:1]
        message: dict[str, object] = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": f"{call_ids}{n:02d}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for n, (name, arguments) in enumerate(calls)
            ]
        return message


def _until(text: str, stops: Sequence[str]) -> str:
    """Cut the text at the first occurrence of any of ``stops``."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]


def split_reasoning(text: str, *, begun: bool) -> tuple[str | None, str]:
    """Split into (reasoning, rest). ``begun``: the template wrote the opening tag. Without an end all is reasoning."""
    stripped = text.lstrip()
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
"""Parsers by name of ``--tool-call-parser``."""

CALL_ENDS: Mapping[str, str] = {"qwen": "</tool_call>", "glm": "</tool_call>"}
"""Text that ends a call, by parser; used to end a turn that may have one call."""


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
