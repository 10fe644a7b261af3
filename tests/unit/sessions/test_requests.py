"""What a request for a chat completion may ask for, with the openai client: what is heeded, what is refused and how.

# covers: M13
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import openai
import pydantic
import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from miles_async.errors import TrajectoryError, TransientEngineError
from miles_async.prompts import templates
from miles_async.prompts.templates import ChatTemplate
from miles_async.rollout.generate import check_sample
from miles_async.trajectory.constraints import CALL_STYLES, GRAMMAR, Constraint, grammar
from miles_async.trajectory.rendering import check_unchanged
from miles_async.trajectory.replies import THINK_TAGS
from miles_async.trajectory.schema_bounds import MOST_WAYS, check_bounds, copies, unbounded, ways
from miles_async.types import GenerateRequest
from tests.fakes.chat_formats import STOPS, TOOLS, chat_format
from tests.fakes.reply_parsers import PARSERS
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import CALL, CHAT, END, QUESTION, agent_of, says

CALLS = {
    "qwen": '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>',
    "llama3": '{"name": "search", "parameters": {"query": "x"}}',
    "glm": "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
}


# ---------------------------------------------------------------------------------------------------- what is heeded
async def test_the_text_of_a_stop_is_in_the_tokens_and_not_in_the_answer() -> None:
    # covers: M14
    model = ScriptedModel(lambda call, input_ids: CHAT.tokenize("one. two; three") if call == 0 else [*END])
    async with agent_of(model, sampling={"stop": ["three"]}) as agent:
        answer = (await agent.chat(QUESTION, stop=["; ", ""])).choices[0]
        assert answer.message.content == "one. two"
        assert model.sampling[0]["stop"] == ["three", "; "]
        await agent.chat(QUESTION, answer.message, {"role": "user", "content": "go on"})
        sample = await agent.sample()
    assert CHAT.decode_all(model.requests[1]).startswith(
        CHAT.decode_all(model.requests[0]) + "one. two; three<|im_end|>"
    )
    assert not sample.more_branches  # the answer without the stop is recognized


async def test_an_assistant_with_a_name_goes_on_with_its_turn() -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        answer = (await agent.chat(QUESTION)).choices[0].message
        named = {"role": "assistant", "name": "solver", "content": answer.content}
        await agent.chat(QUESTION, named, {"role": "user", "content": "sure?"})
        assert await agent.turns_and_branches() == (2, 1)


async def test_a_function_without_parameters_is_called_with_an_empty_object() -> None:
    model = ScriptedModel(says('<tool_call>\n{"name": "search", "arguments": null}\n</tool_call>', "68"))
    async with agent_of(model) as agent:
        answer = (await agent.chat(QUESTION, tools=TOOLS)).choices[0].message
        assert answer.tool_calls[0].function.arguments == "{}"
        call = answer.model_dump()["tool_calls"][0]
        sent = {"role": "assistant", "tool_calls": [{**call, "function": {"name": "search", "arguments": None}}]}
        await agent.client.post(
            "/chat/completions",
            body={
                "messages": [QUESTION, sent, {"role": "tool", "content": "x", "tool_call_id": call["id"]}],
                "tools": TOOLS,
            },
            cast_to=object,
        )
        assert await agent.turns_and_branches() == (2, 1)


async def test_several_answers_are_branches_of_one_conversation() -> None:
    model = ScriptedModel(lambda call, input_ids: [*CHAT.tokenize(f"answer {call}"), *END])
    async with agent_of(model) as agent:
        answer = await agent.chat(QUESTION, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.message.content for choice in answer.choices} == {"answer 0", "answer 1", "answer 2"}
        prompt = len(CHAT.encode([QUESTION]))
        said = sum(len(CHAT.tokenize(f"answer {n}")) + 1 for n in range(3))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, said)
        stream = await agent.chat(QUESTION, n=2, stream=True)
        assert {chunk.choices[0].index async for chunk in stream} == {0, 1}
        assert await agent.turns_and_branches() == (5, 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_those_of_the_tokens_that_were_sampled(stream: bool) -> None:
    async with agent_of(ScriptedModel(says("It is 68."))) as agent:
        answer = await agent.chat(QUESTION, logprobs=True, stream=stream)
        if stream:
            (found,) = [c.choices[0].logprobs async for c in answer if c.choices[0].logprobs]
        else:
            found = answer.choices[0].logprobs
        sample = await agent.sample()
    assert "".join(entry.token for entry in found.content) == "It is 68.<|im_end|>"
    assert [entry.logprob for entry in found.content] == sample.rollout_logprobs[sample.loss_mask == 1].tolist()


async def test_one_call_at_most_if_that_is_asked_for() -> None:
    model = ScriptedModel(says(f"{CALL}\n{CALL}"))
    async with agent_of(model) as agent:
        assert len((await agent.chat(QUESTION, tools=TOOLS)).choices[0].message.tool_calls) == 2
        answer = (await agent.chat(QUESTION, tools=TOOLS, parallel_tool_calls=False)).choices[0]
    assert len(answer.message.tool_calls) == 1
    assert answer.finish_reason == "tool_calls"
    assert [sampling.get("stop") for sampling in model.sampling] == [None, ["</tool_call>"]]  # and no second is sampled


@pytest.mark.parametrize("style", sorted(STOPS))
def test_messages_of_the_developer_reach_the_model_whatever_the_template_knows(style: str) -> None:
    messages = [{"role": "developer", "content": "Answer in French."}, QUESTION]
    chat = chat_format(style)
    rendered = chat.render(messages, (), {}, generation_prompt=True)
    assert "Answer in French." in rendered
    assert tuple(chat.tokenize(rendered)) == chat.encode(messages)


async def test_models_are_listed_and_found() -> None:
    async with agent_of(ScriptedModel(says("x"))) as agent:
        assert [model.id async for model in agent.client.models.list()] == ["policy"]
        assert (await agent.client.models.retrieve("org/some-model")).id == "org/some-model"


# --------------------------------------------------------------------------------------------- structured output
class Answer(pydantic.BaseModel):
    number: int


def accepts(tag: str, text: str) -> bool:
    return _is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(tag), text)


async def test_structured_output_is_constrained_and_parsed_by_the_client() -> None:
    model = ScriptedModel(says('{"number": 68}'))
    async with agent_of(model) as agent:
        parsed = await agent.client.chat.completions.parse(model="policy", messages=[QUESTION], response_format=Answer)
        assert parsed.choices[0].message.parsed == Answer(number=68)
        await agent.chat(QUESTION, response_format={"type": "json_object"})
        await agent.chat(QUESTION, response_format={"type": "text"})
    schema, any_object = (sampling[GRAMMAR] for sampling in model.sampling[:2])
    assert accepts(schema, '{"number": 68}')
    assert accepts(schema, '<think>\nhm\n</think>\n\n{"number": 68}')  # reasoning stays free
    assert not accepts(schema, '{"number": "many"}')
    assert accepts(any_object, '{"a": 1}')
    assert not accepts(any_object, "68")
    assert GRAMMAR not in model.sampling[2]


async def test_calls_that_are_required_are_constrained() -> None:
    model = ScriptedModel(says(CALL))
    named = {"type": "function", "function": {"name": "search"}}
    other = CALL.replace('"search"', '"open_page"')
    async with agent_of(model) as agent:
        answer = await agent.chat(QUESTION, tools=TOOLS, tool_choice="required")
        assert answer.choices[0].message.tool_calls[0].function.name == "search"
        await agent.chat(QUESTION, tools=TOOLS, tool_choice=named)
        await agent.chat(QUESTION, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        await agent.chat(QUESTION, tools=TOOLS, response_format={"type": "json_object"})
    required, by_name, single, either = (sampling[GRAMMAR] for sampling in model.sampling)
    assert [accepts(required, text) for text in (CALL, other, f"{CALL}\n{other}", "68", "")] == [True] * 3 + [False] * 2
    assert [accepts(by_name, text) for text in (CALL, other)] == [True, False]
    assert [accepts(single, text) for text in (CALL, f"{CALL}\n{CALL}")] == [True, False]
    assert [accepts(either, text) for text in (CALL, "{}", "68")] == [True, True, False]


@pytest.mark.parametrize("style", sorted(CALL_STYLES))
def test_a_constraint_allows_what_the_parser_of_its_style_reads(style: str) -> None:
    call = CALLS[style]
    two = call + CALL_STYLES[style].separator + call
    tag = grammar(Constraint(tools=TOOLS), "", call_style=style, reasoning_tags=None)
    assert all(accepts(tag, text) for text in (call, two))
    assert not accepts(tag, "68")
    assert PARSERS[style](two, TOOLS) == ("", [("search", {"query": "x"})] * 2)


def test_reasoning_comes_first_unless_the_template_has_closed_it() -> None:
    schema = Constraint(schema={"type": "object"})
    begun = grammar(schema, "<think>\n", call_style=None, reasoning_tags=None)
    assert [accepts(begun, text) for text in ("hm\n</think>\n\n{}", "{}")] == [True, False]
    closed = grammar(schema, "<think>\n\n</think>\n\n", call_style=None, reasoning_tags=THINK_TAGS)
    assert [accepts(closed, text) for text in ("{}", "<think>\nhm\n</think>\n\n{}")] == [True, False]


async def test_tokens_that_a_grammar_forced_carry_no_loss_and_their_turns_are_counted() -> None:
    # covers: C12
    class Forced(ScriptedModel):
        async def generate(self, request: GenerateRequest) -> Any:
            generation = await super().generate(request)
            logprobs = generation.logprobs * (np.arange(len(generation.logprobs)) % 2)  # every other token: log 1
            return msgspec.structs.replace(generation, logprobs=logprobs.astype(np.float32))

    async with agent_of(Forced(says('{"number": 68}'), version=4)) as agent:
        await agent.chat(QUESTION, response_format={"type": "json_object"})
        constrained = await agent.sample()
    async with agent_of(Forced(says('{"number": 68}'), version=4)) as agent:
        await agent.chat(QUESTION)
        free = await agent.sample()
    assert [sample.metadata["constrained_turns"] for sample in (constrained, free)] == [1, 0]
    said = slice(constrained.prompt_length, None)
    assert constrained.loss_mask[said].tolist() == [n % 2 for n in range(len(constrained.tokens[said]))]
    assert set(constrained.weight_versions[constrained.loss_mask == 1]) == {4}
    assert free.loss_mask[said].all()


async def test_a_broken_log_prob_is_not_taken_for_a_token_that_a_grammar_forced() -> None:
    # covers: C12
    class Broken(ScriptedModel):
        async def generate(self, request: GenerateRequest) -> Any:
            generation = await super().generate(request)
            generation.logprobs[1] = np.nan
            return generation

    async with agent_of(Broken(says('{"number": 68}'), version=4)) as agent:
        await agent.chat(QUESTION, response_format={"type": "json_object"})
        sample = await agent.sample()
    with pytest.raises(TransientEngineError, match="found nan"):
        check_sample(sample)


async def test_a_turn_under_a_grammar_that_a_publication_aborts_begins_again() -> None:
    # covers: M14
    model = ScriptedModel(says('{"number": 68}'))
    model.aborts = {0: 3}
    async with agent_of(model) as agent:
        answer = await agent.chat(QUESTION, response_format={"type": "json_object"})
        sample = await agent.sample()
    assert answer.choices[0].message.content == '{"number": 68}'
    assert model.requests[0] == model.requests[1]  # a grammar begins with what a request generates
    assert model.sampling[0] == model.sampling[1]
    assert CHAT.decode_all(sample.tokens[sample.prompt_length :]) == '{"number": 68}<|im_end|>'


async def test_a_run_whose_loss_does_not_know_of_it_refuses_to_constrain() -> None:
    # covers: C12
    async with agent_of(ScriptedModel(says("{}")), may_constrain=False) as agent:
        for options in ({"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError, match="--use-rollout-logprobs or --use-tis"):
                await agent.chat(QUESTION, **options)
        await agent.chat(QUESTION, response_format={"type": "text"}, tools=TOOLS, tool_choice="auto")


# --------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 0}, "n = 0: from 1 to 128"),
        ({"logprobs": True, "top_logprobs": 3}, "only the sampled token's is known"),
        ({"max_tokens": 0}, "max_tokens = 0: at least 1"),
        ({"max_completion_tokens": 0}, "max_tokens = 0: at least 1"),
        ({"tool_choice": "required"}, "no such tool is offered"),
        ({"tool_choice": {"type": "function", "function": {"name": "absent"}}, "tools": TOOLS}, "no such tool"),
        ({"tool_choice": "always", "tools": TOOLS}, "expected auto, none, required"),
        ({"response_format": {"type": "yaml"}}, "expected type text, json_object, or json_schema"),
        ({"tools": [{"type": "function"}]}, "each needs a function with a name"),
        ({"stop": ["a"] * 17}, "stop: at most 16 texts of at most 256 characters"),
        ({"stop": "a" * 257}, "stop: at most 16 texts"),
    ],
)
async def test_unsupported_options_are_refused_by_name(options: dict, words: str) -> None:
    async with agent_of(ScriptedModel(says("x"))) as agent:
        with pytest.raises(openai.BadRequestError, match=words):
            await agent.chat(QUESTION, **options)


def kwargs(**options: object) -> dict:
    return {"extra_body": {"chat_template_kwargs": options}}


def nested(schema: dict, levels: int) -> dict:
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "return_dict", "messages", "tools", "eos_token", "strftime_now", "unknown"]
)
async def test_an_option_that_is_not_the_templates_own_is_refused(name: str) -> None:
    model = ScriptedModel(says("x"))
    async with agent_of(model) as agent:
        with pytest.raises(
            openai.BadRequestError, match=f"{name} is not an option of the .* which has .*enable_thinking"
        ):
            await agent.chat(QUESTION, **kwargs(**{name: "{% for i in range(99999) %}{{ i }}{% endfor %}"}))
        assert not model.requests
        assert (await agent.chat(QUESTION, **kwargs(enable_thinking=False))).choices[0].message.content == "x"


@pytest.mark.parametrize("value", ["a" * 257, 10**7, -(10**7), ["a"], {"a": 1}])
async def test_options_of_the_template_are_short(value: object) -> None:
    async with agent_of(ScriptedModel(says("x"))) as agent:
        with pytest.raises(openai.BadRequestError, match="enable_thinking: expected a boolean, a number of at most"):
            await agent.chat(QUESTION, **kwargs(enable_thinking=value))
        for short in (True, None, "low", 4096, 0.5):
            await agent.chat(QUESTION, **kwargs(enable_thinking=short))


async def test_a_conversation_that_takes_the_template_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent_of(ScriptedModel(says("x"))) as agent:
        monkeypatch.setattr(templates, "CONVERSATION_SECONDS", -1.0)
        with pytest.raises(openai.BadRequestError, match="refuses this conversation: it takes more than"):
            await agent.chat(QUESTION)
        monkeypatch.undo()
        assert (await agent.chat(QUESTION)).choices[0].message.content == "x"


async def test_an_edit_of_a_long_conversation_is_answered_soon() -> None:
    before, now = ("\n".join(f"{word} {n % 7} {n % 11}" for n in range(20_000)) for word in ("line", "lime"))
    begun = time.process_time()
    with pytest.raises(TrajectoryError, match="renders earlier messages differently"):
        check_unchanged(f"x{before}", f"x{now}")
    assert time.process_time() - begun < 5  # a comparison line by line took minutes


TOO_MUCH = {
    "nested repeats": ({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}, "once its repeats are written out"),
    "a pattern of names": ({"patternProperties": {"(a{99}){99}": {}}}, "once its repeats are written out"),
    "many items": ({"type": "array", "minItems": 100_000}, "minItems of a JSON Schema is 100000: at most 10,000"),
    "long texts": ({"properties": {"a": {"maxLength": 1e9}}}, "maxLength of a JSON Schema"),
    "depth": (nested({"type": "string"}, 200), "nested more than 64 levels deep"),
    "size": ({"enum": ["a" * 100] * 1000}, "more than 65,536 characters"),
    "many lengths": (
        {"properties": {f"p{n}": {"maxLength": n} for n in range(100)}},
        "the different minLength and maxLength .* add up to more than 1,024",
    ),
    "many patterns": ({"anyOf": [{"pattern": "a" * n} for n in range(40)]}, "more than 32 different patterns"),
    "many properties": ({"properties": {f"p{n}": {} for n in range(257)}}, "more than 256 properties"),
    "many counted properties": (
        {"properties": {f"p{n}": {} for n in range(33)}, "minProperties": 2},
        "minProperties or maxProperties and more than 32 properties",
    ),
    "many repeats": ({"pattern": "([a-z]* )*" * 40}, "more than 64 repeats without an upper count"),
    "many ways": ({"pattern": "^([a-z]{1,10} ?){1,10}$"}, "more than 1,000 ways to choose the counts"),
    "many ways in all": (
        {"anyOf": [{"pattern": f"[a-z]{{1,{n}}}"} for n in range(300, 320)]},
        "more than 1,000 ways to choose the counts",
    ),
}


@pytest.mark.parametrize("case", sorted(TOO_MUCH))
async def test_a_schema_that_could_stall_an_engine_is_refused_with_the_bound(case: str) -> None:
    schema, words = TOO_MUCH[case]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    model = ScriptedModel(says("x"))
    async with agent_of(model, max_total=9000) as agent:
        for options in (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
            {"tools": [tool], "tool_choice": "required"},
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                await agent.chat(QUESTION, **options)
    assert not model.requests


@pytest.mark.parametrize("parameters", [[1], 7, "x"])
async def test_parameters_of_a_tool_that_are_no_schema_are_refused(parameters: object) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    async with agent_of(ScriptedModel(says("x"))) as agent:
        with pytest.raises(openai.BadRequestError, match="expected a JSON Schema"):
            await agent.chat(QUESTION, tools=[tool], tool_choice="required")


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("", 0), ("^abc$", 3), (r"\d{4}-\d{2}", 7), ("[a-z{9}]{1,20}", 20), ("(a|b){3}", 6), ("((a{2}){3,}){4}", 24),
     ("(a*){5}", 5), (r"\(a{2}", 3), ("(?:ab){ 2 , 3 }c", 7), ("a{0}", 1), (")a{2}", 3)],
)  # fmt: skip
def test_repeats_of_a_pattern_are_counted_written_out(pattern: str, count: int) -> None:
    assert copies(pattern) == count


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("", 1), ("abc", 1), ("[a-z]+", 1), ("a?", 2), ("a{3}", 1), ("a{1,9}", 9), ("(a{1,9}b){2}", 81), ("(?:a?b){3}", 8),
     ("a{1,3}|b{1,5}|c", 5), ("(a{1,3}){1,2}", 12), ("(a?){2,}", 8), (r"\(a{1,2}", 2), ("(a?", 2), (")a?", 2),
     ("[0-9a-f]{8}-[0-9a-f]{4}", 1), ("(25[0-5]|2[0-4]\\d|1?\\d?\\d)(\\.(25[0-5]|1?\\d?\\d)){3}", 256)],
)  # fmt: skip
def test_ways_to_choose_the_counts_of_repeats(pattern: str, count: int) -> None:
    assert ways(pattern) == count
    assert ways(f"({pattern}a?){{1,900}}") > MOST_WAYS


def test_a_length_beyond_256_counts_as_256() -> None:
    """Each different one costs an engine seconds, whatever the others are."""
    check_bounds([{"properties": {f"p{n}": {"maxLength": 300 + n} for n in range(4)}}])
    check_bounds([{"properties": {f"p{n}": {"maxLength": 300} for n in range(50)}}])
    with pytest.raises(TrajectoryError, match="add up to more than 1,024"):
        check_bounds([{"properties": {f"p{n}": {"maxLength": 300 + n} for n in range(5)}}])
    with pytest.raises(TrajectoryError, match="add up to more than 1,024"):
        check_bounds([{"properties": {f"p{n}": {"minLength": 250, "maxLength": 300 + n} for n in range(3)}}])


@pytest.mark.parametrize(
    ("pattern", "count"), [("", 0), ("a?b{2}", 0), (r"\*[+*]", 0), ("^[a-z]+(-[a-z]{2,})*$", 3), ("(.*)*", 2)]
)
def test_repeats_without_an_upper_count(pattern: str, count: int) -> None:
    assert unbounded(pattern) == count


def test_named_properties_may_be_counted_if_they_are_few() -> None:
    check_bounds([{"properties": {f"p{n}": {} for n in range(32)}, "minProperties": 2}])
    check_bounds([{"additionalProperties": {}, "minProperties": 2, "maxProperties": 500}])


MALFORMED = {
    "deep nesting": b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "not JSON": b"{",
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "a lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "no object": b"[]",
    "messages of another kind": b'{"messages": [1]}',
    "calls of another kind": b'{"messages": [{"role": "assistant", "tool_calls": 7}, {"role": "user", "content": ""}]}',
    "an option of ours": b'{"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"tokenize": 1}}',
}


@pytest.mark.parametrize("name", sorted(MALFORMED))
async def test_a_malformed_body_is_the_clients_error_as_json(name: str) -> None:
    async with agent_of(ScriptedModel(says("x"))) as agent:
        status, body = await agent.post("v1/chat/completions", raw=MALFORMED[name])
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(("path", "status"), [("abort", 400), ("finish", 400), ("v1/embeddings", 404)])
async def test_other_requests_fail_as_json_too(path: str, status: int) -> None:
    async with agent_of(ScriptedModel(says("x"))) as agent:
        found, body = await agent.post(path, raw=b'["\xff"]')
    assert (found, body["error"]["type"]) == (status, "invalid_request_error")


async def test_a_failure_that_nobody_foresaw_is_an_error_as_json_and_the_server_goes_on() -> None:
    def script(call: int, input_ids: list[int]) -> list[int]:
        if call == 0:
            raise ZeroDivisionError
        return [*CHAT.tokenize("68"), *END]

    async with agent_of(ScriptedModel(script)) as agent:
        with pytest.raises(openai.InternalServerError) as caught:
            await agent.chat(QUESTION)
        assert caught.value.body["type"] == "server_error"
        assert (await agent.chat(QUESTION)).choices[0].message.content == "68"


# --------------------------------------------------------------------------------------------------- what is too long
@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of every text that was rendered or tokenized."""
    lengths: list[int] = []
    for name in ("render", "tokenize"):
        original = getattr(ChatTemplate, name)

        def counted(self: Any, *args: Any, original: Any = original, **options: Any) -> Any:
            lengths.append(len(json.dumps(args[0])))
            return original(self, *args, **options)

        monkeypatch.setattr(ChatTemplate, name, counted)
    return lengths


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_a_request_longer_than_any_context_is_refused_before_it_is_read(
    rendered: list[int], in_pieces: bool
) -> None:
    text = "a " * 200_000
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()

    async def pieces() -> AsyncIterator[bytes]:  # as a client sends that doesn't say how much
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    async with agent_of(ScriptedModel(says("x")), max_total=900) as agent:
        rendered.clear()
        status, answer = await agent.post("v1/chat/completions", raw=pieces() if in_pieces else body)
        collected = await agent.collect()
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "the limit is 94336 for a conversation of 900 tokens" in answer["error"]["message"]
    assert rendered == []
    assert collected.cut  # the trajectory ran into the limit


async def test_the_openai_client_sees_a_context_that_is_too_long(rendered: list[int]) -> None:
    async with agent_of(ScriptedModel(says("x")), max_total=900) as agent:
        rendered.clear()
        with pytest.raises(openai.BadRequestError) as caught:
            await agent.chat({"role": "user", "content": "a " * 5_000_000})
        assert caught.value.code == "context_length_exceeded"
        assert rendered == []
        assert (await agent.chat(QUESTION)).choices[0].message.content == "x"


async def test_a_conversation_that_fits_is_read_however_it_is_escaped() -> None:
    content = "\U0001f600" * 10_000  # twelve bytes each as JSON escapes, four tokens
    async with agent_of(ScriptedModel(says("x")), max_total=50_000) as agent:
        body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
        assert len(body) > 120_000
        assert (await agent.post("v1/chat/completions", raw=body))[0] == 200
