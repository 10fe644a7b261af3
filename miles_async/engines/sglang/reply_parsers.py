"""SGLang's own parsers of tool calls and reasoning, and its detection of the parsers that a chat template needs.

They need no GPU, but the package that they are in imports what only GPUs have: see ``cpu/stand_ins.py``. The import
takes a second and more where torch is not there yet, so nothing is imported before a parser is asked for.

Source: sglang.srt.function_call, sglang.srt.parser (0.5.23).
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from miles_async.engines.sglang.cpu import stand_ins
from miles_async.errors import ConfigurationError
from miles_async.runtime.nesting import DEEPEST, too_deep
from miles_async.trajectory.replies import Call
from miles_async.types import JsonObject

if TYPE_CHECKING:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser
    from transformers import PreTrainedTokenizerBase

log = structlog.get_logger(__name__)


_NOT_DETECTED = {
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|start_header_id|>", '"parameters"'),
    "qwen": ("<tool_call>", '"arguments"'),  # Qwen2.5 and Hermes, which have no reasoning
}
"""Marks of templates that SGLang does not detect, by parser."""

CALL_BEGINS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("qwen", "qwen25", "hermes", "glm", "glm45"), ("<tool_call>",)),
    "qwen3_coder": ("<tool_call>", "<function="),
    "glm47": ("<tool_call>",),
    "minimax-m2": ("<minimax:tool_call>",),
    "llama3": ("<|python_tag|>", "{"),
    "mistral": ("[TOOL_CALLS",),
    **dict.fromkeys(("deepseekv3", "deepseekv31"), ("<｜tool▁calls▁begin｜>",)),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
    "gemma4": ("<|tool_call>",),
}
"""Texts with which calls can begin, by parser; unknown for others. Text before them stays as it is, except for white
space at its ends.
"""

CALL_ENDS: Mapping[str, str] = {
    **dict.fromkeys(("qwen", "qwen25", "hermes", "glm", "glm45", "glm47", "qwen3_coder"), "</tool_call>"),
    "gemma4": "<tool_call|>",
}
"""Text that ends a call, by parser; not of formats that close a list of calls after the last one."""

_DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_V3 = "```json"  # around arguments; otherwise its calls have 3.1's marks
_HARMONY = "gpt-oss"  # both parsers' name for the format of gpt-oss
_TO_ROLE = re.compile(  # recipient in front of the channel, as gpt-oss's template writes it
    r"(\A|<\|start\|>assistant) *to=(\S+?) *<\|channel\|>commentary *(?:<\|constrain\|>)?json<\|message\|>"
)
_KIMI = "kimi_k2"
_KIMI_ID = re.compile(r"<\|tool_call_begin\|>\s*([^\s<|]+)\s*<\|tool_call_argument_begin\|>\s*\{")
_MISTRAL = re.compile(r"\[TOOL_CALLS\](?=[\[{])")  # tokenizers differ in the space behind it, which SGLang expects


def detected_call_parser(template: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Name of the parser of tool calls that a chat template needs; None if it needs none."""
    if "tool" not in template:
        return None
    found = _detected("detect_tool_call_parser", template, tokenizer)
    if found == "deepseekv31" and _DEEPSEEK_V3 in template:
        return "deepseekv3"
    if found == "deepseekv3" and _DEEPSEEK_CALLS not in template:
        found = None  # what SGLang says of every template that always opens reasoning, such as Qwen3-Next-Thinking's
    marked = (name for name, marks in _NOT_DETECTED.items() if all(mark in template for mark in marks))
    return found or next(marked, None)


def detected_reasoning_parser(template: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Name of the parser of reasoning that a chat template needs; None if it needs none."""
    reasons = any(word in template.lower() for word in ("think", "thought", "reasoning"))
    return _detected("detect_reasoning_parser", template, tokenizer) if reasons else None


def _detected(function: str, template: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    with importable():
        from sglang.srt.parser import template_detection
    forced, toggle = template_detection.detect_reasoning_pattern(template)
    name: str | None = getattr(template_detection, function)(template, tokenizer, toggle, forced)
    return name


class SGLangCalls:
    """``ParseCalls`` with a parser of SGLang."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """``name``: one of ``TOOL_CALL_PARSERS``. Raises ConfigurationError if the tokenizer lacks what it needs."""
        with importable():
            from sglang.srt.environ import envs
            from sglang.srt.function_call.function_call_parser import FunctionCallParser
        envs.SGLANG_FORWARD_UNKNOWN_TOOLS.default = True  # agents say so themselves; ``set`` would tell our children
        logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)  # a model's mistakes
        self.name = name
        self._tokenizer = tokenizer
        self._parser: type[FunctionCallParser] = FunctionCallParser
        with _named("--tool-call-parser", name):
            self._made([])
        if name == "gemma4":
            read_null_of_gemma4()

    def __call__(self, text: str, tools: Sequence[JsonObject]) -> tuple[str, list[Call]]:
        """See ``ParseCalls``. A text without a readable call stays whole."""
        try:
            whole = _harmony(text) if self.name == _HARMONY else text
            whole = _MISTRAL.sub("[TOOL_CALLS] ", whole) if self.name == "mistral" else whole
            rest, found = self._made(tools).parse_non_stream(whole)
        except Exception as error:  # supervision point: a model writes what it likes, and detectors raise
            log.debug("a detector of SGLang failed", parser=self.name, error=repr(error))
            return text, []
        calls: list[Call] = [(_utf8(item.name), _arguments(_utf8(item.parameters))) for item in found if item.name]
        if self.name == _KIMI:
            calls = _with_ids(calls, text)
        return (rest.rstrip(), calls) if calls else (text, [])

    def _made(self, tools: Sequence[JsonObject]) -> FunctionCallParser:
        return self._parser([_tool(tool) for tool in tools], self.name, tokenizer=self._tokenizer)


class SGLangReasoning:
    """``SplitReasoning`` with a parser of SGLang."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """``name``: one of ``REASONING_PARSERS``. Raises ConfigurationError if the tokenizer lacks what it needs."""
        with importable():
            from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector, ReasoningParser
        self.name = name
        self._tokenizer = tokenizer
        self._parser: type[ReasoningParser] = ReasoningParser
        with _named("--reasoning-parser", name):
            detector = self._made(None).detector
        self.begin: str = getattr(detector, "think_start_token", "") or ""
        self.end: str = getattr(detector, "think_end_token", "") or ""
        self._opening = self.begin + getattr(
            detector, "think_start_self_label", ""
        )  # Gemma 4 names what begins: a thought
        # Others look at the whole text. With this one, what follows the two texts doesn't change what is before.
        self.grows = type(detector).detect_and_parse is BaseReasoningFormatDetector.detect_and_parse

    def __call__(self, text: str, before: str) -> tuple[str | None, str]:
        """See ``SplitReasoning``."""
        written = before.rstrip()
        if self.end and written.endswith(self.end):
            return None, text  # the template has begun and ended it
        begun = bool(self.begin) and written.endswith(self._opening.rstrip())
        if not begun and self.begin and self.end and self.begin not in text and self.end not in text:
            return None, text  # some parsers take all text for reasoning once it has begun
        try:
            whole = _harmony(text) if self.name == _HARMONY else text
            if self.begin and whole.lstrip().startswith(self.begin):  # GLM writes a line feed in front of it
                whole = whole.lstrip()
            if self._opening.startswith(whole):
                return None, text
            reasoning, rest = self._made(True if begun else None).parse_non_stream(whole)
        except Exception as error:  # supervision point: as above
            log.debug("a detector of SGLang failed", parser=self.name, error=repr(error))
            return None, text
        if not reasoning:
            return None, rest or text
        return reasoning.strip("\n"), (rest or "").lstrip("\n")

    def _made(self, begun: bool | None) -> ReasoningParser:
        return self._parser(
            self.name,
            stream_reasoning=False,
            force_reasoning=begun,
            tokenizer=self._tokenizer,
            tool_call_parser_active=True,
        )


def read_null_of_gemma4() -> None:
    """Let SGLang's (0.5.23) parser of Gemma 4's calls read null, which it takes for a text."""
    from sglang.srt.function_call import gemma4_detector

    read = gemma4_detector._parse_gemma4_value
    if read("null") is not None:
        gemma4_detector._parse_gemma4_value = lambda text: None if text.strip() == "null" else read(text)


@contextmanager
def _named(flag: str, name: str) -> Iterator[None]:
    """Raises ConfigurationError for a parser that cannot be made."""
    try:
        yield
    except ValueError as error:
        raise ConfigurationError(f"{flag} {name} cannot be used with this tokenizer: {error}") from error


@contextmanager
def importable() -> Iterator[None]:
    """Let SGLang be imported where packages of GPUs are absent. What it sets in the environment is taken back: our
    children are forked from processes that have not seen it.
    """
    before = dict(os.environ)
    if "sglang.srt" not in sys.modules:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        stand_ins.install()
    hidden = "megatron" not in sys.modules
    if hidden:  # sglang.srt.debug_utils.dumper imports megatron.core, and through it wandb, wherever it finds it
        sys.modules["megatron"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["megatron"]
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _harmony(text: str) -> str:
    """Messages of gpt-oss with what bounds them: the template opens the first, and a stop token closes a call.
    Recipients stand behind the channel, where SGLang expects them.
    """
    text = _TO_ROLE.sub(r"\1<|channel|>commentary to=\2 <|constrain|>json<|message|>", text)
    opened = f"<|start|>assistant{text}" if text.startswith("<|channel|>") else text
    last = opened.rpartition("<|channel|>")[2]
    return f"{opened}<|call|>" if last.startswith("commentary to=") and "<|call|>" not in last else opened


def _with_ids(calls: Sequence[Call], text: str) -> list[Call]:
    """Calls of Kimi with the ids that it wrote, such as functions.search:0, which SGLang reads names from. Without them
    where it wrote other calls as well, that could not be read.
    """
    ids = _KIMI_ID.findall(text)
    if len(ids) != len(calls):
        return [*calls]
    return [(call[0], call[1], call_id) for call, call_id in zip(calls, ids, strict=True)]


def _tool(tool: JsonObject) -> Any:
    """A tool as SGLang has it, unchecked: agents offer what they like, and only name and parameters are read."""
    from sglang.srt.entrypoints.openai.protocol import Function, Tool

    function = tool.get("function", {})
    parameters = function.get("parameters")
    known = Function.model_construct(
        name=str(function.get("name")), parameters=parameters if isinstance(parameters, dict) else {}, strict=False
    )
    return Tool.model_construct(type="function", function=known)


def _utf8(text: str) -> str:
    """Half of a surrogate pair, which a model can write in JSON and UTF-8 cannot have, is a question mark."""
    return text.encode("utf-8", "replace").decode()


def _arguments(text: str) -> object:
    """Arguments as an object, or as they were written if that is no JSON or too deep to be saved. null is what models
    write for a function without any.
    """
    try:
        arguments = json.loads(text)
        if "\\ud" in text.lower():
            arguments = json.loads(_utf8(json.dumps(arguments, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return text
    if too_deep(arguments, DEEPEST // 2):  # messages add some levels
        return text
    return {} if arguments is None else arguments
