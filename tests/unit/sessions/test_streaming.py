"""Answers are streamed while they are sampled, in every protocol.

# covers: M13
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientResponse

from miles_async.sessions import answering
from miles_async.types import JsonObject
from tests.fakes.chat_formats import TOOLS
from tests.fakes.protocol_clients import CLIENTS, PATHS, joined
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import CALL, CHAT, END, QUESTION, Agent, agent_of, says
from tests.waiting import until

each_protocol = pytest.mark.parametrize("protocol", ["chat completions", "responses", "messages"])

LONG = "It is sixty-eight, which is four times seventeen."
THOUGHT = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"


@asynccontextmanager
async def answer_to(
    agent: Agent, protocol: str, tools: Sequence[JsonObject] = (), **options: object
) -> AsyncIterator[ClientResponse]:
    client = CLIENTS[protocol](tools)
    client.append([QUESTION])
    url = f"{agent.opened.base_url}/{PATHS.get(protocol, 'responses')}"
    headers = {"Authorization": f"Bearer {agent.client.api_key}"}
    body = {"model": "policy", **client.body(), "stream": True, **options}
    async with agent.http.post(url, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        yield response


@asynccontextmanager
async def events_of(agent: Agent, protocol: str, **options: object) -> AsyncIterator[AsyncIterator[JsonObject]]:
    """Data of the events of an answer, as they come."""
    async with answer_to(agent, protocol, **options) as response:

        async def events() -> AsyncIterator[JsonObject]:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

        yield events()


async def all_events(agent: Agent, protocol: str, model: ScriptedModel, **options: object) -> list[JsonObject]:
    """All events of an answer; tokens that the model holds come one after another, so that each is shown."""

    async def let_go() -> None:
        for held in model.holds.values():
            await asyncio.sleep(0.01)
            held.set()

    async with events_of(agent, protocol, **options) as events, asyncio.TaskGroup() as scope:
        scope.create_task(let_go())
        return [event async for event in events]


async def until_text(events: AsyncIterator[JsonObject]) -> list[JsonObject]:
    """The first events, up to one that shows something."""
    came: list[JsonObject] = []
    while not joined(came):
        came.append(await anext(events))
    return came


@each_protocol
async def test_text_is_there_before_the_engine_has_finished(protocol: str) -> None:
    model = ScriptedModel(says(LONG))
    finish = model.holds[12] = asyncio.Event()
    async with asyncio.timeout(30), agent_of(model) as agent, events_of(agent, protocol) as events:
        first = await until_text(events)
        assert LONG.startswith(joined(first)["content"])
        finish.set()
        rest = [event async for event in events]
        sample = await agent.sample()
    assert joined([*first, *rest]) == {"content": LONG}
    assert sample.tokens[sample.loss_mask == 1].tolist() == [*CHAT.tokenize(LONG), *END]


@each_protocol
async def test_a_silent_stream_is_kept_open_by_what_its_clients_read(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "_KEEP_ALIVE_SECONDS", 0.2)
    kept_open = {
        "chat completions": b": generating",
        "responses": b"event: response.in_progress",
        "messages": b"event: ping",
    }
    model = ScriptedModel(says(LONG))
    finish = model.holds[12] = asyncio.Event()
    async with asyncio.timeout(30), agent_of(model) as agent, answer_to(agent, protocol) as response:
        silent = 0
        while silent < 3:  # a stream of responses begins with one
            silent += (await response.content.readline()).startswith(kept_open[protocol])
        finish.set()
        rest = [line async for line in response.content]
        assert (await agent.collect()).sample is not None
    assert not any(line.startswith(b"event: error") for line in rest)


@each_protocol
async def test_reasoning_text_and_call_are_those_of_an_answer_that_is_whole(protocol: str) -> None:
    model = ScriptedModel(says(THOUGHT))
    model.holds = {at: asyncio.Event() for at in range(1, len(CHAT.tokenize(THOUGHT)))}
    async with asyncio.timeout(60), agent_of(model) as agent:
        came = await all_events(agent, protocol, model, tools=TOOLS)
    assert joined(came) == {"reasoning": "hm", "content": "Let me see.", "call": '{"query": "17*4"}'}


@each_protocol
async def test_nothing_of_a_call_is_shown_as_text(protocol: str) -> None:
    model = ScriptedModel(says(f"So: {CALL}"))
    finish = model.holds[len(CHAT.tokenize(f"So: {CALL}")) - 2] = asyncio.Event()
    async with asyncio.timeout(30), agent_of(model) as agent:
        async with events_of(agent, protocol, tools=TOOLS) as events:
            came = await until_text(events)
            assert joined(came) == {"content": "So:"}
            finish.set()
            came += [event async for event in events]
    assert joined(came) == {"content": "So:", "call": '{"query": "17*4"}'}


@each_protocol
async def test_a_publication_that_aborts_goes_unnoticed(protocol: str) -> None:
    ids = [*CHAT.tokenize(LONG), *END]
    model = ScriptedModel(lambda call, input_ids: ids if call == 0 else ids[8:])
    model.aborts = {0: 8}
    async with asyncio.timeout(30), agent_of(model) as agent:
        came = await all_events(agent, protocol, model)
        sample = await agent.sample()
    assert joined(came) == {"content": LONG}
    assert len(model.requests) == 2
    assert sample.tokens[sample.loss_mask == 1].tolist() == ids


@each_protocol
async def test_a_stop_of_the_run_may_be_split_by_a_publication(protocol: str) -> None:
    ids = CHAT.tokenize("It is 68.\n### Next question: what are 18 times 4, and 19 times 4, and 20 times 4?")
    begun = next(count for count in range(len(ids)) if CHAT.decode_all(ids[:count]).endswith("Ne"))
    model = ScriptedModel(lambda call, input_ids: ids if call == 0 else ids[begun:])
    model.aborts = {0: begun}
    model.holds = {at: asyncio.Event() for at in range(begun + 1, len(ids))}  # after the publication
    async with asyncio.timeout(60), agent_of(model, sampling={"temperature": 1.0, "stop": ["### Next"]}) as agent:
        came = await all_events(agent, protocol, model)
        sample = await agent.sample()
    assert "question" not in joined(came)["content"]
    assert CHAT.decode_all(sample.tokens[sample.loss_mask == 1].tolist()) == "It is 68.\n### Next"


@each_protocol
@pytest.mark.parametrize("asks_again", [False, True])
async def test_a_stream_ends_with_an_error_when_what_it_showed_is_thrown_away(protocol: str, asks_again: bool) -> None:
    model = ScriptedModel(says(LONG))
    model.restarts = {0: CHAT.tokenize(LONG)[:12]}
    finish = model.holds[12] = asyncio.Event()
    async with asyncio.timeout(30), agent_of(model) as agent:
        async with events_of(agent, protocol) as events:
            came = await until_text(events)
            finish.set()
            came += [event async for event in events]
        assert "threw away" in came[-1]["error"]["message"]
        assert model.given_up == 1
        if asks_again:
            assert (await agent.chat(QUESTION)).choices[0].message.content == LONG
        collected = await agent.collect()
    assert ("threw away" in (collected.failure or "")) is not asks_again
    if not asks_again:
        assert collected.sample is None
        return
    assert collected.sample is not None
    assert (collected.sample.metadata["turns"], collected.sample.more_branches) == (1, ())
    trained = collected.sample.tokens[collected.sample.loss_mask == 1]
    assert trained.tolist() == [*CHAT.tokenize(LONG), *END]


@pytest.mark.parametrize("protocol", ["chat completions", "messages"])
async def test_a_stop_is_in_the_tokens_and_not_in_the_stream(protocol: str) -> None:
    text = "It is 68.\n### Next"
    model = ScriptedModel(lambda call, input_ids: CHAT.tokenize(text))
    model.holds = {at: asyncio.Event() for at in range(1, len(CHAT.tokenize(text)))}
    stop = {"stop_sequences": ["###"]} if protocol == "messages" else {"stop": ["###"]}
    async with asyncio.timeout(60), agent_of(model) as agent:
        came = await all_events(agent, protocol, model, **stop)
        sample = await agent.sample()
    assert joined(came) == {"content": "It is 68.\n"}
    assert sample.tokens[sample.loss_mask == 1].tolist() == CHAT.tokenize(text)


@each_protocol
async def test_of_parallel_calls_that_are_not_allowed_the_first_one_is_streamed(protocol: str) -> None:
    other = CALL.replace("17*4", "x")
    alone = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    options = alone if protocol == "messages" else {"parallel_tool_calls": False}
    both = {"query": "17*4"}, {"query": "x"}
    model = ScriptedModel(says(f"So: {CALL}\n{other}"))
    async with asyncio.timeout(30), agent_of(model) as agent:
        for more, calls in (({}, both), (options, both[:1])):
            came = await all_events(agent, protocol, model, tools=TOOLS, **more)
            assert joined(came) == {"content": "So:", "call": "".join(map(json.dumps, calls))}


async def test_what_nobody_was_shown_is_sampled_again_unnoticed() -> None:
    model = ScriptedModel(says(LONG))
    model.restarts = {0: CHAT.tokenize(CALL)[:8]}  # in the middle of a call
    held, finish = model.holds[8], model.holds[12] = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, held.set)  # meanwhile it is read
    async with (
        asyncio.timeout(20),
        agent_of(model) as agent,
        events_of(agent, "chat completions", tools=TOOLS) as events,
    ):
        came = await until_text(events)
        assert LONG.startswith(joined(came)["content"])
        finish.set()
        came += [event async for event in events]
    assert joined(came) == {"content": LONG}


@each_protocol
async def test_an_agent_that_hangs_up_in_the_middle_ends_its_generation(protocol: str) -> None:
    model = ScriptedModel(says(LONG))
    model.holds[12] = asyncio.Event()
    async with asyncio.timeout(30), agent_of(model) as agent:
        async with events_of(agent, protocol) as events:
            await until_text(events)
        await until(lambda: model.given_up)
        collected = await agent.collect()
    assert (collected.sample, collected.waiting) == (None, True)


async def test_an_answer_to_a_result_of_a_megabyte_is_streamed() -> None:
    model = ScriptedModel(says(CALL, LONG))
    result = "".join(f"line {number} of the page\n" for number in range(45_000))
    assert len(result) > 1_000_000
    async with asyncio.timeout(120), agent_of(model, max_response=1_000_000, max_total=1_000_000) as agent:
        reply = (await agent.chat(QUESTION, tools=TOOLS)).choices[0].message
        asked = [QUESTION, reply.model_dump(), {"role": "tool", "tool_call_id": "call00000", "content": result}]
        came = await all_events(agent, "chat completions", model, messages=asked, tools=TOOLS)
        sample = await agent.sample()
    assert joined(came) == {"content": LONG}
    assert not sample.more_branches
    assert result in CHAT.decode_all(sample.tokens.tolist())
    trained = [*CHAT.tokenize(CALL), *END, *CHAT.tokenize(LONG), *END]
    assert sample.tokens[sample.loss_mask == 1].tolist() == trained


async def test_several_answers_are_streamed_side_by_side() -> None:
    model = ScriptedModel(says("first", "second"))
    async with asyncio.timeout(30), agent_of(model) as agent, events_of(agent, "chat completions", n=2) as events:
        texts = ["", ""]
        async for event in events:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
    assert sorted(texts) == ["first", "second"]


async def test_only_requests_that_ask_for_a_stream_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stream(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ScriptedModel, "stream", stream)
    async with agent_of(ScriptedModel(says("68"))) as agent:
        assert (await agent.chat(QUESTION)).choices[0].message.content == "68"
