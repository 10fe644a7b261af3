"""Tool calls over chat templates of the families that are trained: rendered, sampled, parsed and rendered again, with
the parsers that ``auto`` finds.

Templates of the models come with trl, which is in the lock for its files alone. Those that it lacks are tried where the
environment variable CHAT_TEMPLATES names a folder with a file of the family's name, such as minimax_m2.jinja.

# covers: M14, R3
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import distribution
from pathlib import Path

import pytest

from miles_async.arguments.sessions import AUTO
from miles_async.engines.sglang.reply_parsers import SGLangCalls, SGLangReasoning
from miles_async.errors import TrajectoryError
from miles_async.trajectory.messages import Message
from miles_async.trajectory.rendering import Renderer
from miles_async.trajectory.replies import ReplyParser, extends
from miles_async.trajectory.tree import Trajectory
from miles_async.types import JsonObject
from miles_async.wiring.reply_parsers import reply_parser
from tests.fakes.chat_formats import TEMPLATES, chat_template
from tests.fakes.protocol_clients import CLIENTS, Client
from tests.integration.test_reply_parsers import CONVERSATIONS, TOOL, sampled

pytestmark = pytest.mark.integration

QUESTION = {"role": "user", "content": "17*4?"}
DESCRIBED = {"type": "function", "function": {**TOOL["function"], "description": "Looks something up."}}
THOUGHT = "Hm, so."
SPECIAL = re.compile(r"<\|\w+\|>|<｜[^｜<>']+｜>|\[gMASK\]|<sop>|\[/?[A-Z_]+\]|\]~b\]|\[e~\[|\]~!b\[")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A chat template, and how the model answers under it."""

    models: str  # model_type in config.json, with the model where families have several templates
    file: str = ""  # of trl; empty if it has none
    written_after: str = ""  # a template of tests/fakes/chat_templates in its place
    stops: Sequence[str]
    calls: str
    reasoning: str | None = None
    thinks: bool = False  # the template writes the reasoning of a turn that calls
    opens: str = ""  # what the model writes first if the template opens reasoning that it writes into no past turn
    parallel: bool = True
    moves_tools: bool = False  # the template writes tools in front of the last question, and so changes what is above
    own_ids: bool = False  # the model gives calls their ids


IM_END = ("<|im_end|>",)
GLM = ("<|endoftext|>", "<|user|>", "<|observation|>")
DEEPSEEK = ("<｜end▁of▁sentence｜>",)
FAMILIES = {
    "qwen2_5": Family(file="qwen2_5", models="qwen2", stops=IM_END, calls="qwen"),
    "qwen3": Family(
        file="qwen3", models="qwen3, qwen3_moe", stops=IM_END, calls="qwen", reasoning="qwen3", thinks=True
    ),
    "qwen3_2507": Family(
        file="qwen3_instruct_2507", models="qwen3_moe, qwen3_next (Instruct)", stops=IM_END, calls="qwen"
    ),
    "qwen3_coder": Family(models="qwen3_moe (Coder)", stops=IM_END, calls="qwen3_coder"),
    "qwen3_5": Family(
        file="qwen3_5_think",
        models="qwen3_5_text, qwen3_5_moe_text",
        stops=IM_END,
        calls="qwen3_coder",
        reasoning="qwen3",
        thinks=True,
    ),
    "mistral_nemo": Family(models="mistral", stops=("</s>",), calls="mistral", moves_tools=True),
    "glm4_5": Family(file="glm4moe", models="glm4_moe", stops=GLM, calls="glm45", reasoning="glm45", thinks=True),
    "glm4_7_flash": Family(models="glm4_moe_lite", stops=GLM, calls="glm47", reasoning="glm45", thinks=True),
    "minimax_m2": Family(models="minimax_m2", stops=("[e~[",), calls="minimax-m2", reasoning="minimax", thinks=True),
    "gpt_oss": Family(
        file="gptoss",
        models="gpt_oss",
        stops=("<|return|>", "<|call|>"),
        calls="gpt-oss",
        reasoning="gpt-oss",
        parallel=False,
    ),
    "deepseek_v3": Family(
        file="deepseekv3",
        models="deepseek_v3 (V3, R1)",
        stops=DEEPSEEK,
        calls="deepseekv3",
        reasoning="deepseek-r1",
        opens=f"{THOUGHT}\n</think>\n\n",
    ),
    "deepseek_v31": Family(models="deepseek_v3 (V3.1)", stops=DEEPSEEK, calls="deepseekv31", reasoning="deepseek-r1"),
    "kimi_k2": Family(models="kimi_k2", written_after="kimi_k2", stops=IM_END, calls="kimi_k2", own_ids=True),
}


def template_of(name: str) -> Path:
    if written := FAMILIES[name].written_after:
        return TEMPLATES / f"{written}.jinja"
    if file := FAMILIES[name].file:
        return Path(str(distribution("trl").locate_file(f"trl/chat_templates/{file}.jinja")))
    return Path(os.environ.get("CHAT_TEMPLATES", "/nonexistent")) / f"{name}.jinja"


each_family = pytest.mark.parametrize(
    "name", [name for name in FAMILIES if FAMILIES[name].file or template_of(name).exists()]
)
each_case = pytest.mark.parametrize("case", CONVERSATIONS)


@lru_cache
def parser_of(name: str) -> ReplyParser:
    source = template_of(name).read_text()
    stops = FAMILIES[name].stops
    special = (*dict.fromkeys([*SPECIAL.findall(source), *stops, "<s>"]),)
    return reply_parser(chat_template(source, stops, "<s>", special), AUTO, AUTO)


def calling(name: str, case: str) -> Message:
    """A turn of the model, as a message."""
    calls = [{"name": "search", "arguments": arguments} for arguments in CONVERSATIONS[case]]
    ids = "functions.search:{}" if FAMILIES[name].own_ids else "call000{:02d}"
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": ids.format(n), "type": "function", "function": call} for n, call in enumerate(calls)],
    }
    return {**message, "reasoning_content": THOUGHT} if FAMILIES[name].thinks else message


def results(message: Message) -> list[JsonObject]:
    ids = [call["id"] for call in message["tool_calls"]]
    return [{"role": "tool", "tool_call_id": call_id, "content": f"result {n}"} for n, call_id in enumerate(ids)]


def written(name: str, case: str) -> str:
    """The turn as the template writes it, with the token that ends it."""
    family, chat, message = FAMILIES[name], parser_of(name).chat, calling(name, case)
    before = chat.render([QUESTION], [DESCRIBED], {}, generation_prompt=True)
    whole = chat.render([QUESTION, message, *results(message)], [DESCRIBED], {}, generation_prompt=False)
    if family.opens:
        before = before.removesuffix("<think>\n")
    assert whole.startswith(before)
    text = family.opens + whole[len(before) :]
    ends = [at + len(stop) for stop in family.stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)]


def skip_unwritten(name: str, case: str) -> None:
    if case == "parallel calls" and not FAMILIES[name].parallel:
        pytest.skip("its template writes one call per message")


def client_of(protocol: str, *, streams: bool) -> Client:
    return CLIENTS[protocol]([DESCRIBED], streams=streams)


@each_family
def test_auto_finds_the_parsers_of_the_family(name: str) -> None:
    parser, family = parser_of(name), FAMILIES[name]
    assert isinstance(parser.parse_calls, SGLangCalls)
    split = parser.split_reasoning
    assert split is None or isinstance(split, SGLangReasoning)
    assert (parser.parse_calls.name, split and split.name) == (family.calls, family.reasoning)


@each_family
@each_case
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("protocol", ["chat completions", "messages", "responses"])
def test_calls_go_round_and_the_tokens_stay(name: str, case: str, protocol: str, streams: bool) -> None:
    skip_unwritten(name, case)
    parser, expected = parser_of(name), calling(name, case)
    chat = parser.chat
    trajectory, client = Trajectory(Renderer(chat), parser), client_of(protocol, streams=streams)
    call_ids = [*chat.tokenize(written(name, case))]
    turn = client.take(trajectory, client.exchange([QUESTION]), sampled(call_ids), [3] * len(call_ids))
    assert turn.reply["content"] == ""
    thought = THOUGHT if FAMILIES[name].thinks or FAMILIES[name].opens else ""
    assert turn.reply.get("reasoning_content", "") == thought
    assert turn.reply["tool_calls"] == expected["tool_calls"]
    conversation = [QUESTION, {**turn.reply, "content": ""}, *results(turn.reply)]
    thinking = chat.render(conversation, [DESCRIBED], {}, generation_prompt=True).rstrip().endswith("<think>")
    answer = f"{'hm</think>' if thinking else ''}It is 68.{FAMILIES[name].stops[0]}"
    final = [*chat.tokenize(answer)]
    last = client.take(trajectory, client.exchange(results(turn.reply)), sampled(final))
    assert last.reply["content"] == "It is 68."
    sample = trajectory.sample()
    assert sample is not None
    assert not sample.more_branches
    assert sample.tokens[sample.loss_mask == 1].tolist() == call_ids + final
    text = chat.decode_all(last.context.input_ids().tolist())
    rendered = chat.render(conversation, last.context.tools, {}, generation_prompt=True)
    if not FAMILIES[name].opens:
        assert text == rendered
    else:
        assert text.endswith(rendered[-40:])


@each_family
def test_turns_with_calls_follow_each_other(name: str) -> None:
    parser = parser_of(name)
    trajectory, client = Trajectory(Renderer(parser.chat), parser), client_of("chat completions", streams=False)
    ids, new, rounds = [*parser.chat.tokenize(written(name, "a call"))], [QUESTION], 4
    for _ in range(rounds):
        new = results(client.take(trajectory, client.exchange(new), sampled(ids)).reply)
    sample = trajectory.sample()
    assert sample is not None
    assert not sample.more_branches
    assert sample.tokens[sample.loss_mask == 1].tolist() == rounds * ids


@each_family
@pytest.mark.parametrize("protocol", ["chat completions", "messages", "responses"])
def test_a_malformed_call_is_given_back_and_the_tokens_stay(name: str, protocol: str) -> None:
    parser = parser_of(name)
    chat, whole = parser.chat, written(name, "a call")
    at, stop = whole.index("17*4"), FAMILIES[name].stops[0]
    for broken in (whole[: at + 2], whole.replace("17*4", '17*4"}}] </x>'), whole[:at].replace("search", "sea rch")):
        trajectory, client = Trajectory(Renderer(chat), parser), client_of(protocol, streams=True)
        ids = [*chat.tokenize(broken.removesuffix(stop) + stop)]
        turn = client.take(trajectory, client.exchange([QUESTION]), sampled(ids), [3] * len(ids))
        new = results(turn.reply) if turn.reply.get("tool_calls") else [{"role": "user", "content": "What?"}]
        asked = client.exchange(new)
        if FAMILIES[name].moves_tools and not turn.reply.get("tool_calls"):
            with pytest.raises(TrajectoryError, match="renders earlier messages differently"):
                client.take(trajectory, asked, sampled(ids))
            continue
        final = [*chat.tokenize(f"It is 68.{stop}")]
        client.take(trajectory, asked, sampled(final))
        sample = trajectory.sample()
        assert sample is not None
        assert not sample.more_branches
        trained = sample.tokens[sample.loss_mask == 1].tolist()
        assert trained in (ids + final, ids[:-1] + final)  # templates may write another stop token after text


@each_family
@each_case
def test_what_is_certain_of_a_text_is_a_beginning_of_its_reply(name: str, case: str) -> None:
    skip_unwritten(name, case)
    parser = parser_of(name)
    before = parser.chat.render([QUESTION], [DESCRIBED], {}, generation_prompt=True)
    text = parser.chat.trim(written(name, case))
    reply, shown = parser.reply(text, before, [DESCRIBED], "c"), parser.certain("", before, [DESCRIBED])
    for count in range(len(text) + 1):
        certain = parser.certain(text[:count], before, [DESCRIBED])
        if extends(certain, shown):
            shown = certain
        assert extends(reply, shown), text[:count]
    if FAMILIES[name].thinks:
        assert shown.get("reasoning_content") == THOUGHT


def test_a_template_that_writes_one_call_refuses_several() -> None:
    parser = parser_of("gpt_oss")
    message = calling("gpt_oss", "parallel calls")
    text = parser.chat.render([QUESTION, message, *results(message)], [DESCRIBED], {}, generation_prompt=False)
    assert "17*4" in text
    assert '"x"' not in text
