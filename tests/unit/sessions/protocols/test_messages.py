"""Anthropic's Messages API, with its own client and a scripted model.

# covers: M13, M14
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pydantic
import pytest

from miles_async.trajectory.constraints import GRAMMAR
from tests.fakes.chat_formats import TOOLS as CHAT_TOOLS
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import CALL, CHAT, END, QUESTION, Agent, agent_of, says

TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}  # type: ignore[index]
    for tool in CHAT_TOOLS
]
THINKS = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"


async def streamed(agent: Agent, *messages: object, **options: Any) -> anthropic.types.Message:
    options = {"max_tokens": 400, **options}
    async with agent.anthropic.messages.stream(model="policy", messages=messages, **options) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_text_and_calls_are_blocks(stream: bool) -> None:
    async with agent_of(ScriptedModel(says(THINKS))) as agent:
        ask = streamed if stream else Agent.message
        message = await ask(agent, QUESTION, tools=TOOLS)
    thinking, text, call = message.content
    assert (message.role, message.model, message.stop_reason) == ("assistant", "policy", "tool_use")
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "hm", "miles_async")
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "search", {"query": "17*4"})
    prompt = len(CHAT.encode([QUESTION], CHAT_TOOLS))
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == prompt
    assert message.usage.output_tokens == len(CHAT.tokenize(THINKS)) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_results_of_tools_and_questions_continue_the_tokens(stream: bool) -> None:
    model = ScriptedModel(says(THINKS, "68", "sure"))
    async with agent_of(model) as agent:
        ask = streamed if stream else Agent.message
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        options = {"system": system, "tools": TOOLS}
        conversation: list[Any] = [QUESTION]
        first = await ask(agent, *conversation, **options)
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "68"}
        asked = {"type": "text", "text": "sure?"}
        conversation += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result, asked]}]
        second = await ask(agent, *conversation, **options)
        kept = [block for block in second.content if block.type != "thinking"]
        conversation += [{"role": "assistant", "content": kept}, {"role": "user", "content": "really?"}]
        third = await ask(agent, *conversation, **options)
        sample = await agent.sample()
    assert (second.content[0].text, third.content[0].text, third.stop_reason) == ("68", "sure", "end_turn")
    assert (sample.metadata["turns"], len(sample.branches)) == (3, 1)
    for before, after in zip(model.requests, model.requests[1:], strict=False):
        assert after[: len(before)] == before
    assert "system\nBe brief.\n" in CHAT.decode_all(model.requests[0])
    assert "68\n</tool_response><|im_end|>\n<|im_start|>user\nsure?<|im_end|>" in CHAT.decode_all(model.requests[1])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("{}", {}), ("null", {}), ('["a"]', {"unparsed_arguments": ["a"]}), ('"5"', {"unparsed_arguments": "5"})],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_that_are_no_object_are_shown_and_recognized(
    arguments: str, shown: object, stream: bool
) -> None:
    call = f'<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call>'
    async with agent_of(ScriptedModel(says(call, "68"))) as agent:
        first = await (streamed if stream else Agent.message)(agent, QUESTION, tools=TOOLS)
        assert first.content[-1].input == shown
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "no", "is_error": True}
        answered = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        await agent.message(QUESTION, *answered, tools=TOOLS)
        assert await agent.turns_and_branches() == (2, 1)


async def test_why_a_turn_ended() -> None:
    model = ScriptedModel(lambda call, input_ids: CHAT.tokenize("one. two; three") + ([*END] if call else []))
    async with agent_of(model) as agent:
        stopped = await agent.message(QUESTION, stop_sequences=["three", "; "])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == (
            *("stop_sequence", "; "),
            "one. two",
        )
        cut = await agent.message(QUESTION, max_tokens=2)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
        assert (await agent.message(QUESTION)).stop_reason == "end_turn"
    assert model.sampling[0]["stop"] == ["three", "; "]


async def test_tokens_are_counted_as_they_would_be_sent() -> None:
    model = ScriptedModel(says("68"))
    async with agent_of(model) as agent:
        count = agent.anthropic.messages.count_tokens
        first = await count(model="policy", messages=[QUESTION], tools=TOOLS, system="Be brief.")
        answer = await agent.message(QUESTION, tools=TOOLS, system="Be brief.")
        assert first.input_tokens == len(model.requests[0])
        conversation = [QUESTION, {"role": "assistant", "content": answer.content}]
        asked = {"role": "user", "content": "sure?"}
        whole = await count(model="policy", messages=[*conversation, asked], tools=TOOLS, system="Be brief.")
        other = await count(model="policy", messages=conversation)  # the model's own turn is the last
        await agent.message(*conversation, asked, tools=TOOLS, system="Be brief.")
        sample = await agent.sample()
    assert whole.input_tokens == len(model.requests[1])
    assert 0 < other.input_tokens < whole.input_tokens
    assert (sample.metadata["turns"], len(sample.branches)) == (2, 1)  # counting leaves no trace


async def test_thinking_is_an_option_of_templates_that_know_it() -> None:
    model = ScriptedModel(says("68"))
    async with agent_of(model) as agent:
        await agent.message(QUESTION)
        await agent.message(QUESTION, thinking={"type": "disabled"})
        await agent.message(QUESTION, thinking={"type": "enabled", "budget_tokens": 1024})
    plain, without, thinks = map(CHAT.decode_all, model.requests)
    assert plain == thinks
    assert without == plain + "<think>\n\n</think>\n\n"


async def test_a_line_of_claude_code_that_differs_each_time_makes_no_branch() -> None:
    model = ScriptedModel(says("68"))
    async with agent_of(model) as agent:
        brief = {"type": "text", "text": "Be brief."}
        systems = [
            [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.0; cch={n};"}, brief] for n in "ab"
        ]
        first = await agent.message(QUESTION, system=systems[0])
        conversation = [QUESTION, {"role": "assistant", "content": first.content}, QUESTION]
        await agent.message(*conversation, system=systems[1])
        assert await agent.turns_and_branches() == (2, 1)
    assert "billing" not in CHAT.decode_all(model.requests[0])


async def test_a_conversation_that_is_kept_is_continued_by_what_is_new() -> None:
    model = ScriptedModel(says(CALL, "68", "sure"))
    async with agent_of(model) as agent:
        create = agent.anthropic.beta.messages.create
        options: dict[str, Any] = {"model": "policy", "max_tokens": 100}
        first = await create(**options, messages=[QUESTION], system="Be brief.", tools=TOOLS, thread={"type": "create"})
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "68"}
        continued = {"type": "continue", "previous_message_id": first.id}
        second = await create(**options, messages=[{"role": "user", "content": [result]}], thread=continued)
        stream = await create(
            **options, messages=[QUESTION], thread={**continued, "previous_message_id": second.id}, stream=True
        )
        assert [event.type async for event in stream][-1] == "message_stop"
        with pytest.raises(anthropic.BadRequestError, match="previous_message_id = msg_0"):
            await create(**options, messages=[], thread={**continued, "previous_message_id": "msg_0"})
        assert await agent.turns_and_branches() == (3, 1)
    assert CHAT.decode_all(model.requests[2]).count("Be brief.") == 1


class Answer(pydantic.BaseModel):
    number: int


async def test_calls_and_formats_can_be_demanded() -> None:
    model = ScriptedModel(says(CALL, CALL, '{"number": 68}'))
    async with agent_of(model) as agent:
        await agent.message(QUESTION, tools=TOOLS, tool_choice={"type": "any"})
        chosen = {"type": "tool", "name": "search", "disable_parallel_tool_use": True}
        await agent.message(QUESTION, tools=TOOLS, tool_choice=chosen)
        answer = await agent.anthropic.messages.parse(
            model="policy", max_tokens=99, messages=[QUESTION], output_format=Answer
        )
        await agent.message(QUESTION, tools=TOOLS, tool_choice={"type": "none"})
    assert answer.parsed_output == Answer(number=68)
    some, one, schema = (json.loads(sampling[GRAMMAR]) for sampling in model.sampling[:3])
    assert len(some["format"]["elements"][-1]["tags"]) == 2
    assert len(one["format"]["elements"][-1]["tags"]) == 1
    assert one["format"]["elements"][-1]["stop_after_first"]
    assert schema["format"]["elements"][-1]["json_schema"]["properties"]["number"]["type"] == "integer"
    assert GRAMMAR not in model.sampling[3]
    assert "search" not in CHAT.decode_all(model.requests[3])


async def test_sampling_parameters_are_the_runs() -> None:
    model = ScriptedModel(says("68"))
    async with agent_of(model) as agent:
        ignored = {"temperature": 0.1, "top_p": 0.5, "top_k": 3, "metadata": {"user_id": "u"}, "service_tier": "auto"}
        await agent.message(QUESTION, extra_body={**ignored, "context_management": {"edits": []}})
    assert model.sampling == [{"temperature": 1.0, "max_new_tokens": 400}]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"extra_body": {"container": "c"}}, "container"),
        ({"extra_body": {"mcp_servers": []}}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "search"}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "no such tool is offered"),
        ({"tool_choice": {"type": "all"}, "tools": TOOLS}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": ["x" * 300]}, "stop_sequences"),
        ({"extra_body": {"output_config": {"format": {"type": "xml"}}}}, "output_config.format"),
        ({"system": [{"type": "image", "source": {}}]}, "system: expected text, found a part of type image"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        with pytest.raises(anthropic.BadRequestError, match=named) as caught:
            await agent.message(QUESTION, **options)
        assert caught.value.type == "invalid_request_error"
        collected = await agent.collect()
    assert (collected.sample, collected.failure) == (None, None)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "image", "source": {}}]}, "image"),
        ({"role": "assistant", "content": [{"type": "server_tool_use"}]}, "server_tool_use"),
        ({"role": "tool", "content": "x"}, "roles user and assistant"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "assistant", "content": "The answer is"}, "end before a turn of the assistant"),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}]},
            "tool_result: expected text, found a part of type image",
        ),
    ],
)
async def test_messages_that_have_no_tokens_are_refused_by_name(message: object, named: str) -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        with pytest.raises(anthropic.BadRequestError, match=named):
            await agent.message(QUESTION, message)


async def test_a_conversation_that_is_too_long_is_refused_as_harnesses_know_it() -> None:
    async with agent_of(ScriptedModel(says("one two three four five")), max_response=4) as agent:
        answer = await agent.message(QUESTION)
        with pytest.raises(
            anthropic.BadRequestError,
            match="prompt is too long: this model's maximum context length is",
        ):
            await agent.message(QUESTION, {"role": "assistant", "content": answer.content}, QUESTION)
        assert (await agent.collect()).cut


async def test_other_doors_answer_as_the_client_expects() -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        assert [model.id async for model in agent.anthropic.models.list()] == ["policy"]
        assert (await agent.anthropic.models.retrieve("claude")).display_name == "claude"
        await agent.post("finish")
        with pytest.raises(anthropic.APIStatusError, match="is over: finished"):
            await agent.message(QUESTION)
