"""Parse replies of a model into reasoning, content and tool calls, in the form of chat completions."""

from __future__ import annotations

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


class SplitReasoning(Protocol):
    """``--reasoning-parser``."""

    def __call__(self, text: str, before: str) -> tuple[str | None, str]:
        """Return (reasoning, None without any; the rest of the text). ``before``: what the template wrote in front of
        the text, which may begin the reasoning, or begin and end it.
        """
        ...


THINK_TAGS = ("<think>", "</think>")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyParser:
    """Reads replies. Both steps are optional."""

    chat: ChatFormat
    parse_calls: ParseCalls | None = None
    split_reasoning: SplitReasoning | None = None
    reasoning_tags: tuple[str, str] | None = None  # what begins and ends reasoning, if texts do
    call_style: str | None = None  # a name of ``constraints.CALL_STYLES``, if calls are written in one of these ways

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
        if self.split_reasoning is not None:
            reasoning, text = self.split_reasoning(text, before)
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


CALL_ENDS: Mapping[str, str] = {"qwen": "</tool_call>", "glm": "</tool_call>"}
"""Text that ends a call, by style; used to end a turn that may have one call."""
