"""Tool calls over chat templates of the families that are trained: rendered, sampled, parsed and rendered again, with
the parsers that ``auto`` finds.

Templates of the models come with trl, which is in the lock for its files alone. Those that it lacks are tried where the
environment variable CHAT_TEMPLATES names a folder with a file of the template's name, such as minimax_m2.jinja.

# covers: M14, R3
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
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
from tests.fakes.chat_formats import chat_template
from tests.fakes.protocol_clients import CLIENTS, Client
from tests.integration.template_table import TEMPLATES, THOUGHT, WITHOUT_RESULTS, template_file
from tests.integration.test_reply_parsers import CONVERSATIONS, TOOL, sampled

pytestmark = pytest.mark.integration

QUESTION = {"role": "user", "content": "17*4?"}
DESCRIBED = {"type": "function", "function": {**TOOL["function"], "description": "Looks something up."}}
SPECIAL = re.compile(r"<\|\w+\|?>|<\w+\|>|<\|\"\|>|<｜[^｜<>']+｜>|\[gMASK\]|<sop>|\[/?[A-Z_]+\]|\]~b\]|\[e~\[|\]~!b\[")


def found(name: str) -> Path:
    template = TEMPLATES[name]
    return template_file(name, template.file, template.written_after)


each_template = pytest.mark.parametrize(
    "name", [name for name in TEMPLATES if TEMPLATES[name].file or found(name).exists()]
)
each_case = pytest.mark.parametrize("case", CONVERSATIONS)


def parser_over(file: Path, stops: Sequence[str]) -> ReplyParser:
    source = file.read_text()
    special = (*dict.fromkeys([*SPECIAL.findall(source), *stops, "<s>"]),)
    return reply_parser(chat_template(source, stops, "<s>", special), AUTO, AUTO)


@lru_cache
def parser_of(name: str) -> ReplyParser:
    return parser_over(found(name), TEMPLATES[name].stops)


def calling(name: str, case: str) -> Message:
    """A turn of the model, as a message."""
    calls = [{"name": "search", "arguments": arguments} for arguments in CONVERSATIONS[case]]
    ids = "functions.search:{}" if TEMPLATES[name].own_ids else "call000{:02d}"
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": ids.format(n), "type": "function", "function": call} for n, call in enumerate(calls)],
    }
    return {**message, "reasoning_content": THOUGHT} if TEMPLATES[name].thinks else message


def results(message: Message) -> list[JsonObject]:
    ids = [call["id"] for call in message["tool_calls"]]
    return [{"role": "tool", "tool_call_id": call_id, "content": f"result {n}"} for n, call_id in enumerate(ids)]


def written(name: str, case: str) -> str:
    """The turn as the template writes it, with the token that ends it."""
    family, chat, message = TEMPLATES[name], parser_of(name).chat, calling(name, case)
    before = chat.render([QUESTION], [DESCRIBED], {}, generation_prompt=True)
    whole = chat.render([QUESTION, message, *results(message)], [DESCRIBED], {}, generation_prompt=False)
    if family.opens:
        before = before.removesuffix("<think>\n")
    assert whole.startswith(before)
    text = family.opens + whole[len(before) :]
    ends = [at + len(stop) for stop in family.stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)]


def skip_unwritten(name: str, case: str) -> None:
    if case == "parallel calls" and not TEMPLATES[name].parallel:
        pytest.skip("its template writes one call per message")


def client_of(protocol: str, *, streams: bool) -> Client:
    return CLIENTS[protocol]([DESCRIBED], streams=streams)


@each_template
def test_auto_finds_the_parsers(name: str) -> None:
    parser, family = parser_of(name), TEMPLATES[name]
    assert isinstance(parser.parse_calls, SGLangCalls)
    split = parser.split_reasoning
    assert split is None or isinstance(split, SGLangReasoning)
    assert (parser.parse_calls.name, split and split.name) == (family.calls, family.reasoning)


@each_template
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
    thought = THOUGHT if TEMPLATES[name].thinks or TEMPLATES[name].opens else ""
    assert turn.reply.get("reasoning_content", "") == thought
    assert turn.reply["tool_calls"] == expected["tool_calls"]
    conversation = [QUESTION, {**turn.reply, "content": ""}, *results(turn.reply)]
    thinking = chat.render(conversation, [DESCRIBED], {}, generation_prompt=True).rstrip().endswith("<think>")
    answer = f"{'hm</think>' if thinking else ''}It is 68.{TEMPLATES[name].stops[0]}"
    final = [*chat.tokenize(answer)]
    last = client.take(trajectory, client.exchange(results(turn.reply)), sampled(final))
    assert last.reply["content"] == "It is 68."
    sample = trajectory.sample()
    assert sample is not None
    assert not sample.more_branches
    assert sample.tokens[sample.loss_mask == 1].tolist() == call_ids + final
    text = chat.decode_all(last.context.input_ids().tolist())
    rendered = chat.render(conversation, last.context.tools, {}, generation_prompt=True)
    if not TEMPLATES[name].opens:
        assert text == rendered
    else:
        assert text.endswith(rendered[-40:])


@each_template
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


@each_template
@pytest.mark.parametrize("protocol", ["chat completions", "messages", "responses"])
def test_a_malformed_call_is_given_back_and_the_tokens_stay(name: str, protocol: str) -> None:
    parser = parser_of(name)
    chat, whole = parser.chat, written(name, "a call")
    at, stop = whole.index("17*4"), TEMPLATES[name].stops[0]
    for broken in (whole[: at + 2], whole.replace("17*4", '17*4"}}] </x>'), whole[:at].replace("search", "sea rch")):
        trajectory, client = Trajectory(Renderer(chat), parser), client_of(protocol, streams=True)
        ids = [*chat.tokenize(broken.removesuffix(stop) + stop)]
        turn = client.take(trajectory, client.exchange([QUESTION]), sampled(ids), [3] * len(ids))
        new = results(turn.reply) if turn.reply.get("tool_calls") else [{"role": "user", "content": "What?"}]
        asked = client.exchange(new)
        if TEMPLATES[name].moves_tools and not turn.reply.get("tool_calls"):
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


@each_template
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
    if TEMPLATES[name].thinks:
        assert shown.get("reasoning_content") == THOUGHT


def test_a_template_that_writes_one_call_refuses_several() -> None:
    parser = parser_of("gpt_oss")
    message = calling("gpt_oss", "parallel calls")
    text = parser.chat.render([QUESTION, message, *results(message)], [DESCRIBED], {}, generation_prompt=False)
    assert "17*4" in text
    assert '"x"' not in text


@pytest.mark.parametrize(
    "family", [name for name, (file, _) in WITHOUT_RESULTS.items() if template_file(name, file).exists()]
)
def test_a_template_that_writes_no_results_of_tools_refuses_them(family: str) -> None:
    file, stops = WITHOUT_RESULTS[family]
    parser = parser_over(template_file(family, file), stops)
    assert parser.parse_calls is None
    trajectory, client = Trajectory(Renderer(parser.chat), parser), client_of("chat completions", streams=False)
    ids = [*parser.chat.tokenize(f"hm{stops[0]}")]
    client.take(trajectory, client.exchange([QUESTION]), sampled(ids))
    result = {"role": "tool", "tool_call_id": "call00000", "content": "68"}
    with pytest.raises(TrajectoryError, match=r"leaves out messages of the role 'tool'|refuses this conversation"):
        client.take(trajectory, client.exchange([result]), sampled(ids))
