"""OpenAI's Responses API, with the openai client and a scripted model.

# covers: M13, M14
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from miles_async.errors import TransientEngineError
from miles_async.trajectory.constraints import GRAMMAR
from tests.fakes.chat_formats import TOOLS as CHAT_TOOLS
from tests.fakes.protocol_clients import CLIENTS
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import CALL, CHAT, QUESTION, Agent, agent_of, make_trajectory, says
from tests.property.builders import make_generation

TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]  # type: ignore[dict-item]
THINKS = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": {"type": "text"}}


def calls_patch(arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'apply_patch', 'arguments': arguments})}\n</tool_call>"


async def streamed(agent: Agent, *items: object, **options: Any) -> Any:
    async with agent.client.responses.stream(model="policy", input=[*items], **options) as stream:
        return await stream.get_final_response()


def output(call: Any, text: str) -> dict[str, str]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_text_and_calls_are_items(stream: bool) -> None:
    async with agent_of(ScriptedModel(says(THINKS))) as agent:
        response = await (streamed if stream else Agent.respond)(agent, QUESTION, tools=TOOLS)
    reasoning, message, call = response.output
    assert (response.status, response.model, response.output_text) == ("completed", "policy", "Let me see.")
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm")
    assert (message.type, message.content[0].text) == ("message", "Let me see.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "search", {"query": "17*4"})
    assert response.usage.input_tokens == len(CHAT.encode([QUESTION], CHAT_TOOLS))
    assert response.usage.output_tokens == len(CHAT.tokenize(THINKS)) + 1


async def test_a_stream_has_the_events_of_each_item_in_order() -> None:
    async with agent_of(ScriptedModel(says(THINKS))) as agent:
        events = [event async for event in await agent.respond(QUESTION, tools=TOOLS, stream=True)]
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
async def test_outputs_and_questions_continue_the_tokens(stream: bool, stateful: bool) -> None:
    model = ScriptedModel(says(THINKS, "68", "sure"))
    async with agent_of(model) as agent:
        ask = streamed if stream else Agent.respond
        options = {"tools": TOOLS, "instructions": "Be brief."}
        items: list[Any] = [QUESTION]
        first = await ask(agent, *items, **options)
        new: list[Any] = [output(first.output[-1], "68")]
        items += [*first.output, *new]
        second = await ask(agent, *(new if stateful else items), **options, **continuing(first, stateful))
        new = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "sure?"}]}]
        items += [*second.output, *new]
        third = await ask(agent, *(new if stateful else items), **options, **continuing(second, stateful))
        sample = await agent.sample()
    assert (second.output_text, third.output_text) == ("68", "sure")
    assert (sample.metadata["turns"], len(sample.branches)) == (3, 1)
    for before, after in zip(model.requests, model.requests[1:], strict=False):
        assert after[: len(before)] == before
    assert CHAT.decode_all(model.requests[2]).count("Be brief.") == 1


def continuing(response: Any, stateful: bool) -> dict[str, str]:
    return {"previous_response_id": response.id} if stateful else {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["", "<think>\nhm\n</think>\n\n"])
async def test_a_turn_without_an_answer_is_continued(said: str, stream: bool) -> None:
    async with agent_of(ScriptedModel(says(said, "68"))) as agent:
        first = await (streamed if stream else Agent.respond)(agent, QUESTION)
        assert first.output_text == ""
        await agent.respond(QUESTION, *first.output, {"role": "user", "content": "Well?"})
        assert await agent.turns_and_branches() == (2, 1)


async def test_a_stream_without_an_answer_has_an_empty_message() -> None:
    async with agent_of(ScriptedModel(says(""))) as agent:
        events = [event async for event in await agent.respond(QUESTION, stream=True)]
    (item,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert (item.type, item.content[0].text) == ("message", "")
    assert events[-1].response.output == [item]


async def test_a_response_can_be_continued_twice() -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        first = await agent.respond(QUESTION)
        for text in ("sure?", "really?"):
            await agent.client.responses.create(model="policy", input=text, previous_response_id=first.id)
        assert await agent.turns_and_branches() == (3, 2)


async def test_responses_that_were_not_stored_cannot_be_continued() -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        first = await agent.respond(QUESTION, store=False)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await agent.respond(QUESTION, previous_response_id=first.id)


async def test_outputs_between_the_calls_of_a_turn_continue_it() -> None:
    model = ScriptedModel(says(f"{CALL}\n{CALL}", f"{CALL}\n{CALL}", "68"))
    async with agent_of(model) as agent:
        items: list[Any] = [QUESTION]
        for _ in range(2):
            one, other = (await agent.respond(*items, tools=TOOLS)).output
            items += [one, output(one, "1"), other, output(other, "2")]
        await agent.respond(*items, tools=TOOLS)
        assert await agent.turns_and_branches() == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"input": "*** Begin"}, "*** Begin"),
        ({"patch": "*** Begin"}, '{"patch": "*** Begin"}'),
        ({"input": 3}, '{"input": 3}'),
        ({"input": '{"input": 3}'}, '{"input": 3}'),
        ("*** Begin", "*** Begin"),
        ("3", '"3"'),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_custom_tools_have_a_text_and_are_recognized(
    arguments: object, shown: str, stream: bool
) -> None:
    """Also if the model wrote something else than that one text."""
    async with agent_of(ScriptedModel(says(calls_patch(arguments), "done"))) as agent:
        (call,) = (await (streamed if stream else Agent.respond)(agent, QUESTION, tools=[PATCH])).output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", shown)
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
        await agent.respond(QUESTION, call, result, tools=[PATCH])
        assert await agent.turns_and_branches() == (2, 1)


def test_messages_of_stored_responses_are_in_memory_once() -> None:
    """Though each request of a client without state has all of them."""
    client, trajectory = CLIENTS["responses"](), make_trajectory()
    for number in range(3):
        exchange = client.exchange([{"role": "user", "content": f"question {number}"}])
        sampled = make_generation(CHAT.tokenize(f"answer {number}"), engines=("engine-0",))
        client.take(trajectory, exchange, sampled)
    first, *_, last = (kept.messages for kept in client.history.conversations.values())
    assert [message["content"] for message in last] == [
        f"{text} {n}" for n in range(3) for text in ("question", "answer")
    ]
    assert last[0] is first[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_of_a_namespace_are_called_by_their_names(stream: bool) -> None:
    model = ScriptedModel(says(CALL, "68"))
    offered = [{"type": "namespace", "name": "web", "description": "Pages.", "tools": TOOLS}]
    async with agent_of(model) as agent:
        first = await (streamed if stream else Agent.respond)(agent, QUESTION, tools=offered)
        (call,) = first.output
        assert (call.type, call.name, call.to_dict()["namespace"]) == ("function_call", "search", "web")
        await agent.respond(QUESTION, call.to_dict(), output(call, "68"), tools=offered)
        with pytest.raises(openai.BadRequestError, match="several open_page, search"):
            await agent.respond(QUESTION, tools=[*offered, *TOOLS])
        sample = await agent.sample()
    assert model.requests[0] == [*CHAT.encode([QUESTION], CHAT_TOOLS)]
    assert (sample.metadata["turns"], len(sample.branches)) == (2, 1)


async def test_why_a_response_is_incomplete() -> None:
    async with agent_of(ScriptedModel(says("one two three four five"))) as agent:
        response = await agent.respond(QUESTION, max_output_tokens=2)
        events = [event async for event in await agent.respond(QUESTION, max_output_tokens=2, stream=True)]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "incomplete")


class Answer(pydantic.BaseModel):
    number: int


async def test_calls_and_formats_can_be_demanded() -> None:
    model = ScriptedModel(says(CALL, CALL, '{"number": 68}'))
    async with agent_of(model) as agent:
        await agent.respond(QUESTION, tools=TOOLS, tool_choice="required")
        choice = {"type": "function", "name": "search"}
        await agent.respond(QUESTION, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        answer = await agent.client.responses.parse(model="policy", input=[QUESTION], text_format=Answer)
        await agent.respond(QUESTION, tools=TOOLS, tool_choice="none")
    assert answer.output_parsed == Answer(number=68)
    some, one, schema = (json.loads(sampling[GRAMMAR]) for sampling in model.sampling[:3])
    assert len(some["format"]["elements"][-1]["tags"]) == 2
    assert one["format"]["elements"][-1]["stop_after_first"]
    assert schema["format"]["elements"][-1]["json_schema"]["properties"]["number"]["type"] == "integer"
    assert GRAMMAR not in model.sampling[3]


async def test_sampling_parameters_are_the_runs() -> None:
    model = ScriptedModel(says("68"))
    async with agent_of(model) as agent:
        ignored = {"temperature": 0.1, "top_p": 0.5, "truncation": "auto", "include": ["reasoning.encrypted_content"]}
        await agent.respond(QUESTION, **ignored, reasoning={"effort": "low"}, prompt_cache_key="k")
    assert model.sampling == [{"temperature": 1.0, "max_new_tokens": 500}]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "function"}]}, "name"),
        ({"tool_choice": "required"}, "no such tool is offered"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "message.output_text.logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"previous_response_id": "resp_0"}, "resp_0"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        with pytest.raises(openai.BadRequestError, match=named):
            await agent.respond(QUESTION, **options)
        collected = await agent.collect()
    assert (collected.sample, collected.failure) == (None, None)


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "item_reference"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "reads none"),
        ({"role": "critic", "content": "x"}, "role"),
        ({"role": "assistant", "content": "The answer is"}, "end before a turn of the assistant"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "name"),
    ],
)
async def test_items_that_have_no_tokens_are_refused_by_name(item: object, named: str) -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        with pytest.raises(openai.BadRequestError, match=named):
            await agent.respond(QUESTION, item)


async def test_a_stream_that_fails_raises_in_the_client() -> None:
    model = ScriptedModel(lambda call, input_ids: TransientEngineError("connection cut"))
    async with agent_of(model) as agent:
        with pytest.raises(openai.APIError, match="connection cut"):
            [event async for event in await agent.respond(QUESTION, stream=True)]
        assert (await agent.collect()).failure == "connection cut"
