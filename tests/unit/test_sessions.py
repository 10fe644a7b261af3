"""The session server as agents and the run see it, with the openai client and a scripted model.

# covers: M13
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest

from miles_async.engines.client import http_error
from miles_async.errors import StalledError, TransientEngineError
from miles_async.serialization import decode, encode
from miles_async.sessions.records import Collected, OpenSession, SessionSettings
from miles_async.sessions.server import SessionServer
from miles_async.trajectory.rendering import Renderer
from miles_async.trajectory.replies import ReplyParser, parse_qwen
from miles_async.trajectory.tree import Trajectory
from miles_async.trajectory.turn import take_turn
from tests.fakes.chat_formats import TOOLS, chat_format
from tests.fakes.scripted_model import ScriptedModel

CHAT = chat_format("qwen3")
END = CHAT.tokenize("<|im_end|>")
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "17*4"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "17*4?"}


def says(*texts: str) -> Callable[[int, list[int]], list[int]]:
    return lambda call, input_ids: [*CHAT.tokenize(texts[min(call, len(texts) - 1)]), *END]


def make_trajectory() -> Trajectory:
    return Trajectory(Renderer(CHAT), ReplyParser(chat=CHAT, parse_calls=parse_qwen, splits_reasoning=True))


@dataclass
class Agent:
    """One session and a client in it."""

    opened: OpenSession
    client: openai.AsyncOpenAI
    http: aiohttp.ClientSession

    async def chat(self, *messages: Any, **options: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=messages, **options)

    async def post(self, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        async with self.http.post(f"{self.opened.url}/{path}", json=body) as response:
            return response.status, await response.json()

    async def status(self) -> dict[str, Any]:
        async with self.http.get(self.opened.url) as response:
            return await response.json()

    async def collect(self) -> Collected:
        async with self.http.post(f"{self.opened.url}/collect") as response:
            assert response.status == 200, await response.text()
            return decode(await response.read(), Collected)


@asynccontextmanager
async def agent_of(model: ScriptedModel, *, timeout: float = 60.0, **settings: Any) -> AsyncIterator[Agent]:
    server = SessionServer(model, make_trajectory, session_timeout=timeout)
    await server.start("127.0.0.1")
    expiry = asyncio.ensure_future(server.expire())
    async with aiohttp.ClientSession() as http:
        body = SessionSettings(
            **{
                "routing_key": "7-1",
                "sampling": {"temperature": 1.0},
                "max_response": 500,
                "max_total": 900,
                **settings,
            }
        )
        async with http.post(f"{server.url}/sessions", data=encode(body)) as response:
            opened = decode(await response.read(), OpenSession)
        async with openai.AsyncOpenAI(base_url=opened.base_url, api_key="none", max_retries=0) as client:
            yield Agent(opened, client, http)
    expiry.cancel()
    await server.stop()


# -------------------------------------------------------------------------------------------- chat completions
async def test_chat_is_token_level_generation_of_the_same_tokens() -> None:
    # covers: R2
    model = ScriptedModel(says("It is 68."), version=3)
    async with agent_of(model) as agent:
        answer = await agent.chat(QUESTION)
        collected = await agent.collect()
    assert answer.choices[0].message.content == "It is 68."
    assert answer.choices[0].finish_reason == "stop"
    prompt = CHAT.encode([QUESTION])
    direct = await take_turn(ScriptedModel(says("It is 68."), version=3), prompt, model.sampling[0], routing_key="7-1")
    sample = collected.sample
    assert sample is not None
    assert model.requests == [list(prompt)]
    assert sample.tokens.tolist() == [*prompt, *direct.output_ids.tolist()]
    assert sample.rollout_logprobs[sample.loss_mask == 1].tolist() == direct.logprobs.tolist()
    assert sample.weight_versions[sample.loss_mask == 1].tolist() == direct.weight_versions.tolist()
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(direct.output_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt) // 2


async def test_a_tool_call_and_its_result_extend_the_tokens() -> None:
    # covers: R3, M14
    model = ScriptedModel(says(f"<think>\nhm\n</think>\n\n{CALL}", "68"))
    async with agent_of(model) as agent:
        first = (await agent.chat(QUESTION, tools=TOOLS)).choices[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", None)
        assert first.message.reasoning_content == "hm"
        (call,) = first.message.tool_calls
        assert json.loads(call.function.arguments) == {"query": "17*4"}
        result = {"role": "tool", "content": "68", "tool_call_id": call.id}
        second = (await agent.chat(QUESTION, first.message, result, tools=TOOLS)).choices[0]
        assert second.message.content == "68"
        status = await agent.status()
        sample = (await agent.collect()).sample
    assert sample is not None
    assert model.requests[1][: len(model.requests[0])] == model.requests[0]
    assert CHAT.decode_all(model.requests[1]).endswith("68\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert (sample.metadata["turns"], sample.text) == (2, "68")
    assert status["turns"] == 2
    assert status["cached_tokens"] == sum(len(request) // 2 for request in model.requests)  # on this path, too
    assert status["prompt_tokens"] == sum(len(request) for request in model.requests)


async def test_streams_carry_what_answers_do() -> None:
    model = ScriptedModel(says(f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"))
    async with agent_of(model) as agent:
        stream = await agent.chat(QUESTION, tools=TOOLS, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "search")
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.completion_tokens > 0


async def test_limits_and_stops_of_the_agent_hold_and_its_temperature_does_not() -> None:
    model = ScriptedModel(says("one two three four five"))
    async with agent_of(model, sampling={"temperature": 1.0, "stop": ["a"]}) as agent:
        answer = await agent.chat(QUESTION, max_tokens=3, temperature=0.1, top_p=0.5, stop="b")
        assert answer.choices[0].finish_reason == "length"
        await agent.chat(QUESTION)
    assert model.sampling[0] == {"temperature": 1.0, "stop": ["a", "b"], "max_new_tokens": 3}
    assert model.sampling[1] == {"temperature": 1.0, "stop": ["a"], "max_new_tokens": 500}
    assert set(model.routing_keys) == {"7-1"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 2}, "one answer per request"),
        ({"logprobs": True}, "kept for the trainer"),
        ({"tool_choice": "required", "tools": TOOLS}, "auto or none"),
        ({"response_format": {"type": "json_object"}}, "not constrained"),
        ({"max_tokens": 0}, "max_tokens = 0"),
    ],
)
async def test_what_there_is_not_is_refused_by_name(options: dict, words: str) -> None:
    async with agent_of(ScriptedModel(says("x"))) as agent:
        with pytest.raises(openai.BadRequestError, match=words):
            await agent.chat(QUESTION, **options)


async def test_a_conversation_without_room_is_refused_as_clients_know_it() -> None:
    async with agent_of(ScriptedModel(says("one two three four five")), max_response=4) as agent:
        answer = await agent.chat(QUESTION)
        with pytest.raises(openai.BadRequestError) as caught:
            await agent.chat(QUESTION, answer.choices[0].message, {"role": "user", "content": "go on"})
        assert caught.value.code == "context_length_exceeded"
        collected = await agent.collect()
    assert collected.cut
    assert collected.sample.finish_reason == "length"


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (http_error(413, "body too large"), 413, "body too large"),
        (http_error(429, "slow down"), 429, "slow down"),
        (TransientEngineError("connection cut"), 503, "connection cut"),
        (StalledError("no engine"), 504, "no engine"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_keep_the_upstreams_status_and_text(
    error: Exception, status: int, text: str, stream: bool
) -> None:
    # covers: C5
    async with agent_of(ScriptedModel(lambda call, input_ids: error)) as agent:
        if stream:  # its status is sent before the answer is there
            with pytest.raises(openai.APIError, match=text):
                [chunk async for chunk in await agent.chat(QUESTION, stream=True)]
        else:
            with pytest.raises(openai.APIStatusError, match=text) as caught:
                await agent.chat(QUESTION)
            assert caught.value.status_code == status
        collected = await agent.collect()
    assert (collected.failure is None) == (status == 413)  # that one is the agent's fault
    assert collected.sample is None


# ------------------------------------------------------------------------------------------------------ sessions
async def test_the_last_word_of_an_agent_is_its_reward() -> None:
    # covers: C4
    async with agent_of(ScriptedModel(says("68"))) as agent:
        answer = await agent.chat(QUESTION)
        assert await agent.post("finish", {"reward": 0.5}) == (
            200,
            {"session_id": agent.opened.session_id, "reward": 0.5},
        )
        with pytest.raises(openai.APIStatusError, match="is over: finished"):
            await agent.chat(QUESTION, answer.choices[0].message, QUESTION)
        assert (await agent.post("finish", {}))[0] == 410
        collected = await agent.collect()
        assert (collected.ending, collected.reward) == ("finished", 0.5)
        assert collected.sample is not None
        assert (await agent.post("heartbeat"))[0] == 404


async def test_a_reward_that_is_no_number_is_refused() -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        status, body = await agent.post("finish", {"reward": "much"})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert (await agent.status())["ending"] == "open"


async def test_an_aborted_session_says_why() -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        assert (await agent.post("abort", {"reason": "the sandbox died"}))[0] == 200
        with pytest.raises(openai.APIStatusError, match="aborted the sandbox died"):
            await agent.chat(QUESTION)
        assert (await agent.collect()).ending == "aborted"


async def test_a_session_that_nobody_uses_expires_unless_there_is_a_heartbeat() -> None:
    model = ScriptedModel(says("68"), seconds=1.2)
    async with agent_of(model, timeout=0.8) as agent:
        await agent.chat(QUESTION)  # takes longer: it is in use
        for _ in range(5):
            await asyncio.sleep(0.2)
            assert (await agent.post("heartbeat"))[0] == 200
        await asyncio.sleep(1.2)
        assert (await agent.post("heartbeat"))[0] == 410
        assert (await agent.collect()).ending == "expired"


async def test_late_turns_never_revive_a_session_that_was_collected() -> None:
    # covers: C11
    model = ScriptedModel(says("68"), seconds=0.2)
    async with agent_of(model) as agent:
        late = asyncio.ensure_future(agent.chat(QUESTION))
        await asyncio.sleep(0.1)
        collected = await agent.collect()
        with pytest.raises(openai.APIConnectionError):
            await late
        with pytest.raises(openai.NotFoundError, match="it is over, or the server was restarted"):
            await agent.chat(QUESTION)
    assert (collected.sample, collected.waiting) == (None, True)


async def test_an_agent_that_hangs_up_ends_its_generation() -> None:
    model = ScriptedModel(says("68"), seconds=30)
    async with agent_of(model) as agent:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await agent.chat(QUESTION)
        await asyncio.sleep(0.1)
        assert (await agent.status())["idle_seconds"] > 0
        collected = await agent.collect()
    assert (collected.sample, collected.waiting) == (None, True)


async def test_parallel_requests_become_branches() -> None:
    model = ScriptedModel(lambda call, input_ids: [*CHAT.tokenize(f"answer {call}"), *END], seconds=0.05)
    async with agent_of(model) as agent:
        await asyncio.gather(*(agent.chat({"role": "user", "content": f"part {n}"}) for n in range(3)))
        collected = await agent.collect()
    assert len(collected.sample.branches) == 3
    assert all(branch.loss_mask.any() for branch in collected.sample.branches)
