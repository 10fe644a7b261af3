"""Parse replies of a model into reasoning, content and tool calls, in the form of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_async.trajectory.messages import Message
from miles_async.trajectory.rendering import ChatFormat
from miles_async.types import JsonObject

Call = tuple[str, object] | tuple[str, object, str]
"""Name and arguments, which are an object, or the model's text if it is not one; and the id, if the model wrote one."""


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


CALL_ID = "call"
"""Prefix of the call ids that we make."""

THINK_TAGS = ("<think>", "</think>")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyParser:
    """Reads replies. Both steps are optional."""

    chat: ChatFormat
    parse_calls: ParseCalls | None = None
    split_reasoning: SplitReasoning | None = None
    reasoning_tags: tuple[str, str] | None = None  # what begins and ends reasoning, if texts do
    call_style: str | None = None  # a name of ``constraints.CALL_STYLES``, if calls are written in one of these ways
    call_begins: Sequence[str] | None = None  # every call begins with one of these; None: unknown, so no content is
    # certain before the turn is over
    call_end: str | None = None  # ends every call, and a turn that may have one; None: unknown, or more follows
    reasoning_grows: bool = True  # reasoning in a text stays reasoning when the text grows

    def reply(
        self,
        text: str,
        before: str,
        tools: Sequence[JsonObject],
        call_ids: str,
        *,
        stops: Sequence[str] = (),
        parallel: bool = True,
        shown: Message | None = None,
    ) -> Message:
        """Build the assistant's message.

        Args:
            text: the sampled text, without the tokens that bound it.
            before: text of the template in front of it, which may begin the reasoning.
            tools: that were offered; nothing is read as a call without them.
            call_ids: what the ids of tool calls begin with to which the model gave none.
            stops: texts that end the turn, and are not part of the message.
            parallel: the message may have several calls; else it has the first one.
            shown: what the agent has seen of the message already. Text that it was shown as content stays content,
                whatever came after it.
        """
        message = self._read(_until(text, stops), before, tools, call_ids, parallel)
        if shown is not None and not extends(message, shown):
            plain: Message = {"role": "assistant", "content": _until(text, stops)}
            return plain if extends(plain, shown) else message
        return message

    def certain(
        self, text: str, before: str, tools: Sequence[JsonObject], *, stops: Sequence[str] = (), parallel: bool = True
    ) -> Message:
        """The certain part of a message whose ``text`` may continue: reasoning and content, no calls.

        Nothing that may begin a call or a stop, and no white space at the end. Arguments: see :meth:`reply`.
        """
        tags = self.reasoning_tags or ()
        if self.split_reasoning is not None and not (tags and self.reasoning_grows):
            return {"role": "assistant", "content": ""}
        reads_calls = bool(tools) and self.parse_calls is not None
        begins = self.call_begins or () if reads_calls else ()
        bounds = [self.chat.decode_all([stop]) for stop in self.chat.stop_ids]
        marks = (*stops, *tags, *bounds, *(self.call_begins or ()))
        whole = _without_beginning(_until(text, (*stops, *begins)), marks)
        read = self._read(whole, before, (), "", parallel)
        content, reasoning = read["content"].rstrip(), read.get("reasoning_content", "")
        uncertain = reads_calls and (self.call_begins is None or content[:1].isspace())
        unended = bool(reasoning) and not any(tag in whole for tag in tags[1:])
        if uncertain or unended or any(tag in content for tag in tags):
            content = ""
        message: dict[str, object] = {"role": "assistant", "content": content}
        if reasoning := reasoning if content else reasoning.rstrip():
            message["reasoning_content"] = reasoning
        return message

    def _read(self, text: str, before: str, tools: Sequence[JsonObject], call_ids: str, parallel: bool) -> Message:
        reasoning = None
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
            ids = _ids(calls, call_ids)
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, (name, arguments, *_) in zip(ids, calls, strict=True)
            ]
        return message


def _ids(calls: Sequence[Call], begin: str) -> Sequence[str]:
    """The model's ids, since the template may repeat them with results; ours for calls whose id is missing or repeated
    in the turn.
    """
    ids: dict[str, None] = {}
    for n, (_, _, *written) in enumerate(calls):
        ids[written[0] if written and written[0] not in ids else f"{begin}{n:02d}"] = None
    return [*ids]


def extends(message: Message, shown: Message) -> bool:
    """Return whether a message continues the part that was ``shown``."""
    reasoning, begun = message.get("reasoning_content", ""), shown.get("reasoning_content", "")
    content = shown["content"]
    same = reasoning == begun if content else reasoning.startswith(begun)  # content comes after all reasoning
    return same and bool(message["content"].startswith(content))


def _without_beginning(text: str, marks: Sequence[str]) -> str:
    """Leave out the end of the text that may be the beginning of one of ``marks``."""
    longest = max(map(len, marks), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return text[:at]
    return text


def _until(text: str, stops: Sequence[str]) -> str:
    """Cut the text at the first occurrence of any of ``stops``."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]
