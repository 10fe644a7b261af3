"""Parsers of replies by the names that flags have: SGLang's, found by the chat template, or a hook."""

from __future__ import annotations

from miles_async.arguments.sessions import AUTO
from miles_async.engines.sglang.reply_parsers import (
    CALL_BEGINS,
    CALL_ENDS,
    SGLangCalls,
    SGLangReasoning,
    detected_call_parser,
    detected_reasoning_parser,
)
from miles_async.prompts.templates import ChatTemplate
from miles_async.runtime.hooks import load_object
from miles_async.trajectory.replies import ParseCalls, ReplyParser


def reply_parser(template: ChatTemplate, tool_calls: str | None, reasoning: str | None) -> ReplyParser:
    """Make the parser of ``--tool-call-parser`` and ``--reasoning-parser``. Raises ConfigurationError."""
    if tool_calls == AUTO:
        tool_calls = detected_call_parser(template.source, template.tokenizer)
    if reasoning == AUTO:
        reasoning = detected_reasoning_parser(template.source, template.tokenizer)
    parse_calls = None if tool_calls is None else call_hook(tool_calls) or SGLangCalls(tool_calls, template.tokenizer)
    split = None if reasoning is None else SGLangReasoning(_OTHER_NAMES.get(reasoning, reasoning), template.tokenizer)
    return ReplyParser(
        chat=template,
        parse_calls=parse_calls,
        split_reasoning=split,
        reasoning_tags=(split.begin, split.end) if split is not None and split.begin and split.end else None,
        call_style=_STYLES.get(tool_calls or ""),
        call_begins=CALL_BEGINS.get(tool_calls or ""),
        call_end=CALL_ENDS.get(tool_calls or ""),
        reasoning_grows=split is None or split.grows,
    )


def call_hook(name: str | None) -> ParseCalls | None:
    """``--tool-call-parser module:attr``; None if it is a name. Raises ConfigurationError."""
    return load_object(name, ParseCalls, "--tool-call-parser") if name is not None and ":" in name else None


_OTHER_NAMES = {"think": "qwen3"}

_STYLES = {
    **dict.fromkeys(("qwen", "qwen25", "hermes"), "qwen"),
    **dict.fromkeys(("glm", "glm45"), "glm"),
    "llama3": "llama3",
}
"""How calls are written that can be demanded (``constraints.CALL_STYLES``), by parser."""
