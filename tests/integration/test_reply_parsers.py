"""SGLang's parsers of tool calls and reasoning, as trajectories use them: in this process, without an engine.

# covers: M14, R3
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from miles_async.arguments.sessions import AUTO, REASONING_PARSERS, TOOL_CALL_PARSERS
from miles_async.engines.sglang.reply_parsers import CALL_BEGINS, CALL_ENDS, SGLangCalls, SGLangReasoning, importable
from miles_async.errors import ConfigurationError
from miles_async.trajectory.rendering import Renderer
from miles_async.trajectory.replies import ReplyParser, extends
from miles_async.trajectory.tree import Trajectory
from miles_async.types import Generation, JsonObject
from miles_async.wiring.reply_parsers import reply_parser
from tests.fakes import reply_parsers as fakes
from tests.fakes.chat_formats import TOOLS, chat_format
from tests.fakes.protocol_clients import CLIENTS

pytestmark = pytest.mark.integration

Calls = Sequence[tuple[str, JsonObject]]
Write = Callable[[Calls], str]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def joined(separator: str, write: Callable[[int, str, JsonObject], str], begin: str = "", end: str = "") -> Write:
    def written(calls: Calls) -> str:
        return begin + separator.join(write(n, name, value) for n, (name, value) in enumerate(calls)) + end

    return written


def pairs(value: JsonObject, pair: str) -> str:
    shown = {key: each if isinstance(each, str) else dumps(each) for key, each in value.items()}
    return "".join(pair % each for each in shown.items())


FORMATS: dict[str, tuple[str, Write]] = {
    # family → (parser, how it writes calls)
    "qwen2, qwen3, qwen3_moe": (
        "qwen",
        joined("\n", lambda _, name, v: f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(v)}}}\n</tool_call>'),
    ),
    "llama": ("llama3", joined("; ", lambda _, name, v: f'{{"name": "{name}", "parameters": {dumps(v)}}}')),
    "mistral": (
        "mistral",
        joined(", ", lambda _, name, v: f'{{"name": "{name}", "arguments": {dumps(v)}}}', "[TOOL_CALLS] [", "]"),
    ),
    "glm4_moe": (
        "glm45",
        joined(
            "\n",
            lambda _, name, v: (
                f"<tool_call>{name}\n" + pairs(v, "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n") + "</tool_call>"
            ),
        ),
    ),
    "deepseek_v3": (
        "deepseekv3",
        joined(
            "\n",
            lambda _, name, v: (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(v)}\n```<｜tool▁call▁end｜>"
            ),
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v3 (3.1)": (
        "deepseekv31",
        joined(
            "",
            lambda _, name, v: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(v)}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "kimi_k2": (
        "kimi_k2",
        joined(
            "",
            lambda n, name, v: (
                f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{dumps(v)}<|tool_call_end|>"
            ),
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    "gpt_oss": (
        "gpt-oss",
        joined(
            "<|start|>assistant",
            lambda _, name, v: (
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(v)}<|call|>"
            ),
        ),
    ),
    "qwen3_moe (Coder)": (
        "qwen3_coder",
        joined(
            "\n",
            lambda _, name, v: (
                f"<tool_call>\n<function={name}>\n"
                + pairs(v, "<parameter=%s>\n%s\n</parameter>\n")
                + "</function>\n</tool_call>"
            ),
        ),
    ),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "where": {"type": "object"}},
        },
    },
}
SIMPLE: JsonObject = {"query": "17*4"}
NESTED: JsonObject = {"query": 'größer als "zwölf" → 数', "limit": 3, "where": {"a": [1, {"b": None}], "ü": "{}"}}
CONVERSATIONS = {"a call": [SIMPLE], "parallel calls": [SIMPLE, {"query": "x", "limit": 2}], "nested": [NESTED]}
READ_WHILE_WRITTEN = ("gpt_oss", "qwen3_moe (Coder)")
"""Families whose parsers give a call that was cut, with the arguments so far."""

each_family = pytest.mark.parametrize("family", FORMATS)


def test_flags_take_the_names_that_sglang_has() -> None:
    with importable():
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.parser.reasoning_parser import ReasoningParser

    assert set(TOOL_CALL_PARSERS) == set(FunctionCallParser.ToolCallParserEnum)
    assert set(REASONING_PARSERS) == set(ReasoningParser.DetectorMap)


@pytest.mark.long  # it changes with SGLang
def test_null_in_gemma_4s_calls_needs_our_reading() -> None:
    """Fails when SGLang reads it by itself: ``read_null_of_gemma4`` can go then."""
    read = (
        "from miles_async.engines.sglang.reply_parsers import importable\nwith importable():\n"
        "    from sglang.srt.function_call.gemma4_detector import _parse_gemma4_args\n"
        "print(_parse_gemma4_args('a:null,b:[null]'))"
    )
    ran = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.splitlines()[-1] == "{'a': 'null', 'b': ['null']}"
    text = "<|tool_call>call:search{limit:null,where:{a:[1,null]}}<tool_call|>"
    assert SGLangCalls("gemma4")(text, [TOOL]) == ("", [("search", {"limit": None, "where": {"a": [1, None]}})])


@pytest.mark.parametrize("name", sorted({*TOOL_CALL_PARSERS} - {"response_template"}))
def test_every_parser_of_calls_leaves_a_text_alone(name: str) -> None:
    assert SGLangCalls(name)("The answer is 68.", [TOOL]) == ("The answer is 68.", [])


@pytest.mark.parametrize("name", sorted({*REASONING_PARSERS} - {"response_template"}))
def test_every_parser_of_reasoning_can_be_made(name: str) -> None:
    reasoning, rest = SGLangReasoning(name)("The answer is 68.", "")
    assert "The answer is 68." in (reasoning or "") + rest


@pytest.mark.parametrize("parser", [SGLangCalls, SGLangReasoning])
def test_a_parser_that_a_tokenizer_has_to_describe_is_refused_without(parser: type) -> None:
    with pytest.raises(ConfigurationError, match="-parser response_template cannot be used with this tokenizer"):
        parser("response_template")


def test_channels_of_gpt_oss() -> None:
    parser = ReplyParser(
        chat=chat_format("qwen3"), parse_calls=SGLangCalls("gpt-oss"), split_reasoning=SGLangReasoning("gpt-oss")
    )
    thinks = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "x"}'  # <|call|> ends it
    replies = [parser.reply(thinks + text, "", [TOOL], "call0") for text in (call, "<|channel|>final<|message|>68")]
    assert [reply.get("reasoning_content") for reply in replies] == ["hm", "hm"]
    assert replies[0]["tool_calls"][0]["function"] == {"name": "search", "arguments": {"query": "x"}}
    assert (replies[1]["content"], replies[1].get("tool_calls")) == ("68", None)


def test_calls_of_kimi_keep_the_ids_that_it_wrote() -> None:
    # covers: M14
    def ids(*written: str) -> list[str]:
        calls = [
            f'<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{{"query": "x"}}<|tool_call_end|>'
            for call_id in written
        ]
        text = f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"
        parser = ReplyParser(chat=chat_format("qwen3"), parse_calls=SGLangCalls("kimi_k2"))
        return [call["id"] for call in parser.reply(text, "", [TOOL], "call007")["tool_calls"]]

    assert ids("functions.search:3", "functions.search:4") == ["functions.search:3", "functions.search:4"]
    assert ids("5") == ["5"]
    assert ids("functions.search:0", "functions.search:0") == ["functions.search:0", "call00701"]
    assert ids("functions.search:0", "functions.sea/rch") == ["call00700"]  # the second is not read


@each_family
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("protocol", ["chat completions", "messages", "responses"])
def test_calls_go_round_and_the_tokens_stay(family: str, conversation: str, protocol: str) -> None:
    """Rendered, sampled, parsed, sent back by a client, rendered: one branch, whose loss is on what was sampled."""
    name, write = FORMATS[family]
    calls = [("search", arguments) for arguments in CONVERSATIONS[conversation]]
    chat = chat_format("qwen3")
    trajectory = Trajectory(Renderer(chat), ReplyParser(chat=chat, parse_calls=SGLangCalls(name)))
    client, said = CLIENTS[protocol]([TOOL]), []
    new: list[JsonObject] = [{"role": "user", "content": "17*4?"}]
    for _ in range(3):
        output_ids = [*chat.tokenize(write(calls)), *chat.tokenize("<|im_end|>")]
        said += output_ids
        turn = client.take(trajectory, client.exchange(new), sampled(output_ids))
        found = turn.reply.get("tool_calls", [])
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in found] == calls
        new = [{"role": "tool", "content": "68", "tool_call_id": call["id"]} for call in found]
    sample = trajectory.sample()
    assert sample is not None
    assert not sample.more_branches
    assert sample.tokens[sample.loss_mask == 1].tolist() == said


@each_family
def test_a_turn_that_may_have_one_call_ends_with_it(family: str) -> None:
    """``call_end`` ends a call whose format closes no list after the last one, which is a stop token with gpt-oss."""
    name, write = FORMATS[family]
    one, both = (write([("search", SIMPLE)] * number) for number in (1, 2))
    end = CALL_ENDS.get(name)
    assert (end is not None) == (both.startswith(one) and name not in ("gpt-oss", "llama3"))
    if end is not None:
        text, calls = SGLangCalls(name)(both[: both.index(end) + len(end)], [TOOL])
        assert (text, [call[:2] for call in calls]) == ("", [("search", SIMPLE)])


@each_family
def test_a_call_can_be_saved_whatever_the_model_wrote_in_it(family: str) -> None:
    """Half of a surrogate pair is no UTF-8."""
    name, write = FORMATS[family]
    written = write([("search", {"query": "MARK"}), ("MARK", {"query": "x"})]).replace("MARK", r"a\ud83d")
    _, calls = SGLangCalls(name)(written, [TOOL])
    json.dumps([call[:2] for call in calls], ensure_ascii=False).encode()


@each_family
def test_a_malformed_call_stays_text(family: str) -> None:
    name, write = FORMATS[family]
    whole = write([("search", SIMPLE)])
    parse = SGLangCalls(name)
    complete = parse(whole, [TOOL])
    for cut in range(len(whole)):
        text, calls = parse(whole[:cut], [TOOL])
        if calls and family in READ_WHILE_WRITTEN:
            called, arguments, *_ = calls[0]
            assert (text, called, len(calls)) == ("", "search", 1)
            assert isinstance(arguments, dict)
            assert arguments.keys() <= {"query"}
            assert arguments.get("query", "") in whole[:cut]
        else:
            assert (text, calls) in ((whole[:cut], []), complete)
    broken = whole.replace('"17*4"', '"17*4').replace("search", "sear ch\x00")
    unbroken = '"17*4"' not in whole  # arguments without quotes, of a function that no agent has offered
    assert parse(broken, [TOOL]) == (("", [("sear ch\x00", SIMPLE)]) if unbroken else (broken, []))


@pytest.mark.parametrize(
    ("style", "calls", "reasoning"),
    [("qwen3", "qwen25", "qwen3"), ("glm", "glm45", "glm45"), ("llama3", "llama3", None), ("mistral", "mistral", None)],
)
def test_the_parsers_of_a_template_are_found(style: str, calls: str, reasoning: str | None) -> None:
    parser = reply_parser(chat_format(style), AUTO, AUTO)
    assert isinstance(parser.parse_calls, SGLangCalls)
    assert parser.parse_calls.name in (calls, calls.removesuffix("25"))
    split = parser.split_reasoning
    assert (split.name if isinstance(split, SGLangReasoning) else split) == reasoning
    if reasoning:
        assert parser.reasoning_tags == ("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("<think>\nhm\n</think>\n\nyes", ""),
        ("hm\n</think>\n\nyes", "<think>\n"),
        ("hm, and cut", "<think>\n"),
        ("yes", ""),
        ("yes", "<think>\n\n</think>\n\n"),
    ],
)
def test_reasoning_is_split_as_the_fake_does(text: str, before: str) -> None:
    assert SGLangReasoning("qwen3")(text, before) == fakes.split_think(text, before)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("qwen", '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'),
        ("qwen", '<tool_call>\n{"name": "open_page", "arguments": null}\n</tool_call>'),
        ("qwen", "<tool_call>\n{not json}\n</tool_call>"),
        ("llama3", '{"name": "search", "parameters": {"query": "x"}}; {"name": "search", "parameters": {}}'),
        ("llama3", '{"answer": 3}'),
        ("glm", "<tool_call>search\n<arg_key>limit</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"),
        ("glm", "<tool_call>search"),
    ],
)
def test_fakes_of_unit_tests_parse_as_sglang_does(style: str, text: str) -> None:
    assert fakes.PARSERS[style](text, TOOLS) == SGLangCalls(style)(text, TOOLS)


def sampled(output_ids: Sequence[int]) -> Generation:
    length = len(output_ids)
    return Generation(
        output_ids=np.array(output_ids, np.int32),
        logprobs=np.full(length, -0.5, np.float32),
        weight_versions=np.zeros(length, np.int32),
        finish_reason="stop",
    )


def test_importing_sglang_changes_no_variable() -> None:
    """Engines and ranks are forked from processes that imported without what it sets, and would be refused."""
    code = """
import os
before = dict(os.environ)
from miles_async.engines.sglang.reply_parsers import importable
with importable():
    import sglang.srt.function_call.function_call_parser
changed = os.environ.items() ^ before.items()
assert not changed, changed
"""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("SGLANG_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


# --------------------------------------------------------------------------------------------------- streams
@each_family
@pytest.mark.parametrize("before", ["", "Let me see. ", "Let me see.\n\n", " hm "])
@pytest.mark.parametrize("case", CONVERSATIONS)
def test_what_is_certain_of_a_text_is_a_beginning_of_its_reply(family: str, before: str, case: str) -> None:
    name, write = FORMATS[family]
    parser = ReplyParser(chat=chat_format("qwen3"), parse_calls=SGLangCalls(name), call_begins=CALL_BEGINS.get(name))
    calls = write([("search", value) for value in CONVERSATIONS[case]])
    for text in (before + calls, before + calls + " after", f"{before}no call", before + calls[: len(calls) // 2]):
        reply, shown = parser.reply(text, "", [TOOL], "c"), parser.certain("", "", [TOOL])
        for count in range(len(text) + 1):
            certain = parser.certain(text[:count], "", [TOOL])
            if extends(certain, shown):
                shown = certain
            assert extends(reply, shown), text[:count]
    if name in CALL_BEGINS and before.startswith("Let"):
        assert shown["content"] == before.rstrip()


@pytest.mark.parametrize("name", sorted({*REASONING_PARSERS} - {"response_template"}))
@pytest.mark.parametrize("opened", [True, False])
def test_what_is_certain_of_reasoning_is_a_beginning_of_it(name: str, opened: bool) -> None:
    split = SGLangReasoning(name)
    parser = ReplyParser(
        chat=chat_format("qwen3"),
        split_reasoning=split,
        reasoning_tags=(split.begin, split.end) if split.begin and split.end else None,
        reasoning_grows=split.grows,
    )
    before = split.begin if opened else ""
    for thought in ("hm", "\nhm, so \n", ""):
        for rest in ("It is 68.", "\n\nIt is 68.\n", ""):
            text = f"{'' if opened else split.begin}{thought}{split.end}{rest}"
            reply, shown = parser.reply(text, before, (), "c"), parser.certain("", before, ())
            for count in range(len(text) + 1):
                certain = parser.certain(text[:count], before, ())
                if extends(certain, shown):
                    shown = certain
                assert extends(reply, shown), text[:count]
