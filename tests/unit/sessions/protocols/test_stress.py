"""What goes wrong with agents, in every protocol: they hang up, send megabytes, and come all at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from miles_async.runtime.serialization import decode, encode
from miles_async.sessions.session import SessionSettings
from miles_async.trajectory.taker import Limits
from miles_async.types import CollectedSession, JsonObject, OpenSession
from tests.fakes.protocol_clients import CLIENTS, PATHS, Client
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import CHAT, END, QUESTION, Agent, agent_of, says
from tests.waiting import until

each_protocol = pytest.mark.parametrize("protocol", CLIENTS)
EPISODES = 200


async def ask(
    agent: Agent, url: str, protocol: str, client: Client, new: Sequence[JsonObject], **options: object
) -> str:
    """Ask for a turn and keep the answer in the conversation; return the body of the answer."""
    client.append(new)
    path = PATHS.get(protocol, "responses")
    async with agent.http.post(f"{url}/v1/{path}", json={**client.body(), **options}) as response:
        text = await response.text()
        assert response.status == 200, text
        if not options.get("stream"):
            client.receive(json.loads(text))
        return text


@each_protocol
async def test_an_agent_that_hangs_up_in_a_stream_ends_its_generation(protocol: str) -> None:
    model = ScriptedModel(says("68"), seconds=30)
    async with agent_of(model) as agent:
        asking = asyncio.create_task(
            ask(agent, agent.opened.url, protocol, CLIENTS[protocol](), [QUESTION], stream=True)
        )
        await until(lambda: model.requests)
        asking.cancel()
        await agent.is_idle()
        model.seconds = 0.0
        await ask(agent, agent.opened.url, protocol, CLIENTS[protocol](), [QUESTION])
        collected = await agent.collect()
    assert collected.sample is not None
    assert (collected.sample.metadata["turns"], len(collected.sample.branches)) == (1, 1)


@each_protocol
async def test_a_megabyte_of_a_tool_is_in_the_tokens(protocol: str) -> None:
    model = ScriptedModel(says("68"))
    text = "seventeen times four is 68\n" * 40_000
    async with agent_of(model, max_total=1_000_000, max_response=1_000_000) as agent:
        client = CLIENTS[protocol]()
        await ask(agent, agent.opened.url, protocol, client, [QUESTION])
        result = {"role": "tool", "content": text, "tool_call_id": "call00000"}
        await ask(agent, agent.opened.url, protocol, client, [result])
        sample = await agent.sample()
    assert text.strip() in CHAT.decode_all(model.requests[1])
    assert (sample.metadata["turns"], len(sample.branches)) == (2, 1)
    assert sample.loss_mask.sum() == 2 * len([*CHAT.tokenize("68"), *END])


@each_protocol
async def test_episodes_at_once_stay_apart(protocol: str) -> None:
    """Each of 200 agents gets what the model says to it, and each sample has its own tokens alone."""
    model = ScriptedModel(lambda call, input_ids: [*CHAT.tokenize(echo(input_ids)), *END], seconds=0.01)
    async with agent_of(model) as agent:
        server = agent.opened.url.rpartition("/sessions/")[0]
        settings = SessionSettings(routing_key="7-1", sampling={}, limits=Limits(response=500, total=900))

        async def episode(number: int) -> None:
            async with agent.http.post(f"{server}/sessions", data=encode(settings)) as response:
                url = decode(await response.read(), OpenSession).url
            client = CLIENTS[protocol]()
            for turn in range(3):
                asked = {"role": "user", "content": f"{number}:{turn}?"}
                assert f"heard {number}:{turn}" in await ask(agent, url, protocol, client, [asked])
            async with agent.http.post(f"{url}/collect") as response:
                sample = decode(await response.read(), CollectedSession).sample
            assert (sample.metadata["turns"], len(sample.branches)) == (3, 1)
            said = "".join(f"heard {number}:{turn}<|im_end|>" for turn in range(3))
            assert CHAT.decode_all(sample.tokens[sample.loss_mask == 1]) == said

        await asyncio.gather(*map(episode, range(EPISODES)))


def echo(input_ids: list[int]) -> str:
    asked = CHAT.decode_all(input_ids).rpartition("user\n")[2].partition("?")[0]
    return f"heard {asked}"
