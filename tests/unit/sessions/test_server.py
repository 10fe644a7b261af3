"""The session server as agents and the run see it, with the openai client and a scripted model.

# covers: M13
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np
import openai
import pytest
import structlog
from aiohttp import web

from miles_async.engines.http import http_error
from miles_async.errors import StalledError, TransientEngineError
from miles_async.runtime.network.ports import HeldPort
from miles_async.sessions.middleware import as_json
from miles_async.sessions.server import SessionServer
from miles_async.trajectory.tree import Trajectory
from miles_async.trajectory.turn import take_turn
from miles_async.types import GenerateRequest, Generation, JsonObject, RewardParts
from tests.fakes import session_agents
from tests.fakes.chat_formats import TOOLS
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import CALL, CHAT, END, QUESTION, agent_of, says
from tests.waiting import until


# ------------------------------------------------------------------------------------------------------- address
async def test_it_listens_at_one_address_on_a_port_of_the_range() -> None:
    # covers: A6
    with HeldPort("127.0.0.2") as free:
        port = free.number
    server = SessionServer(Mock(), Mock(), keys=session_agents.KEYS.sessions, session_timeout=60.0)
    await server.start("127.0.0.2", range(port, port + 1))
    try:
        assert server.url == f"http://127.0.0.2:{port}"
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
    finally:
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
    alone = ScriptedModel(says("It is 68."), version=3)
    request = GenerateRequest(input_ids=np.array(prompt, np.int32), sampling=model.sampling[0], routing_key="7-1")
    direct = await take_turn(alone, request)
    sample = collected.sample
    assert sample is not None
    assert model.requests == [list(prompt)]
    assert sample.tokens.tolist() == [*prompt, *direct.output_ids.tolist()]
    assert sample.rollout_logprobs[sample.loss_mask == 1].tolist() == direct.logprobs.tolist()
    assert sample.weight_versions[sample.loss_mask == 1].tolist() == direct.weight_versions.tolist()
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(direct.output_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt) // 2


async def test_a_session_whose_turn_was_kept_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: C5
    servers: list[SessionServer] = []

    def make(*args: object, **options: object) -> SessionServer:
        servers.append(SessionServer(*args, **options))
        return servers[-1]

    monkeypatch.setattr(session_agents, "SessionServer", make)
    async with agent_of(ScriptedModel(says("It is 68."), version=3)) as agent:
        assert servers[0].began() == {}
        await agent.chat(QUESTION)
        assert servers[0].began() == {agent.opened.session_id: 3}
        assert servers[0].began() == {}


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
        sample = await agent.sample()
    assert model.requests[1][: len(model.requests[0])] == model.requests[0]
    assert CHAT.decode_all(model.requests[1]).endswith("68\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert (sample.metadata["turns"], sample.text) == (2, "68")
    assert status["turns"] == 2
    assert status["cached_tokens"] == sum(len(request) // 2 for request in model.requests)  # on this path, too
    assert status["prompt_tokens"] == sum(len(request) for request in model.requests)


async def test_a_stream_ends_with_its_reason_and_if_asked_for_the_usage() -> None:
    async with agent_of(ScriptedModel(says(CALL))) as agent:
        stream = await agent.chat(QUESTION, tools=TOOLS, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_without_room_is_refused_as_clients_know_it(stream: bool) -> None:
    async with agent_of(ScriptedModel(says("one two three four five")), max_response=4) as agent:
        answer = await agent.chat(QUESTION)
        with pytest.raises(openai.BadRequestError) as caught:
            await agent.chat(QUESTION, answer.choices[0].message, {"role": "user", "content": "go on"}, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        collected = await agent.collect()
    assert collected.cut
    assert collected.sample.finish_reason == "length"


async def test_an_agent_that_begins_again_with_less_is_not_cut() -> None:
    async with agent_of(ScriptedModel(says("one two three four five", "a")), max_response=4) as agent:
        answer = await agent.chat(QUESTION)
        with pytest.raises(openai.BadRequestError):
            await agent.chat(QUESTION, answer.choices[0].message, {"role": "user", "content": "go on"})
        await agent.chat({"role": "user", "content": "In short?"})
        assert not (await agent.collect()).cut


@pytest.mark.parametrize(("room", "asked", "cut"), [(4, 100, True), (500, 4, False), (500, 100, False)])
async def test_a_turn_that_the_limits_end_cuts_the_trajectory(room: int, asked: int, cut: bool) -> None:
    """Codex ends with an error then, and asks no more."""
    async with agent_of(ScriptedModel(says("one two three four five")), max_response=room) as agent:
        await agent.chat(QUESTION, max_tokens=asked)
        collected = await agent.collect()
    assert collected.cut == cut


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
    # covers: A5
    async with agent_of(ScriptedModel(lambda call, input_ids: error)) as agent:
        with pytest.raises(openai.APIStatusError, match=text) as caught:
            await agent.chat(QUESTION, stream=stream)
        assert caught.value.status_code == status
        collected = await agent.collect()
    assert (collected.failure is None) == (status == 413)  # that one is the agent's fault
    assert collected.sample is None


# ------------------------------------------------------------------------------------------------------ sessions
async def test_the_last_word_of_an_agent_is_its_reward() -> None:
    # covers: A4
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


async def test_the_agents_reward_may_have_parts() -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        await agent.chat(QUESTION)
        assert (await agent.post("finish", {"reward": 0.5, "parts": {"right": 1}}))[0] == 200
        assert (await agent.collect()).reward == RewardParts(reward=0.5, parts={"right": 1.0})


@pytest.mark.parametrize("body", [{"reward": "much"}, {"parts": {"right": 1.0}}])
async def test_a_reward_that_is_no_number_is_refused(body: JsonObject) -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        status, body = await agent.post("finish", body)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert (await agent.status())["ending"] == "open"


async def test_an_aborted_session_says_why() -> None:
    async with agent_of(ScriptedModel(says("68"))) as agent:
        assert (await agent.post("abort", {"reason": "the sandbox died"}))[0] == 200
        with pytest.raises(openai.APIStatusError, match="aborted the sandbox died"):
            await agent.chat(QUESTION)
        assert (await agent.collect()).ending == "aborted"


async def test_a_session_that_nobody_uses_expires_unless_there_is_a_heartbeat() -> None:
    model = ScriptedModel(says("68"), seconds=3.0)
    async with agent_of(model, timeout=2.5) as agent:
        await agent.chat(QUESTION)  # takes longer: it is in use
        for _ in range(6):
            await asyncio.sleep(0.5)
            assert (await agent.post("heartbeat"))[0] == 200
        await asyncio.sleep(6.0)
        assert (await agent.post("heartbeat"))[0] == 410
        assert (await agent.collect()).ending == "expired"


async def test_late_turns_never_revive_a_session_that_was_collected() -> None:
    # covers: A11
    model = ScriptedModel(says("68"), seconds=30)
    async with agent_of(model) as agent:
        late = asyncio.ensure_future(agent.chat(QUESTION))
        await until(lambda: model.requests)
        collected = await agent.collect()
        with pytest.raises(openai.APIConnectionError):
            await late
        with pytest.raises(openai.NotFoundError, match="it is over, or the server was restarted"):
            await agent.chat(QUESTION)
    assert (collected.sample, collected.waiting) == (None, True)


async def test_an_agent_that_hangs_up_ends_its_generation() -> None:
    model = ScriptedModel(says("68"), seconds=30)
    async with agent_of(model) as agent:
        chat = asyncio.create_task(agent.chat(QUESTION))
        await until(lambda: model.requests)
        chat.cancel()
        await agent.is_idle()
        collected = await agent.collect()
    assert (collected.sample, collected.waiting) == (None, True)


async def test_an_answer_to_a_client_that_has_gone_is_no_error_of_the_server() -> None:
    async def answers(request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("Cannot write to closing transport")

    with structlog.testing.capture_logs() as logs, pytest.raises(ConnectionResetError):
        await as_json(Mock(), answers)
    assert not logs


async def test_a_session_whose_sample_cannot_be_made_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trajectory, "sample", Mock(side_effect=TransientEngineError("it has to be repeated")))
    async with agent_of(ScriptedModel(says("68"))) as agent:
        await agent.chat(QUESTION)
        collected = await agent.collect()
    assert (collected.sample, collected.failure) == (None, "it has to be repeated")


class Uneven(ScriptedModel):
    """Fails the first request for A while one for B, which takes longer, is under way."""

    async def generate(self, request: GenerateRequest) -> Generation:
        self.seconds = 0.05 if "AAA" in CHAT.decode_all(request.input_ids.tolist()) else 0.5
        return await super().generate(request)


@pytest.mark.parametrize("repeats", [False, True])
async def test_the_failure_of_an_agent_among_several_stays_until_its_request_is_repeated(repeats: bool) -> None:
    def script(call: int, input_ids: Sequence[int]) -> list[int] | Exception:
        fails = "AAA" in CHAT.decode_all(input_ids) and call < 2
        return TransientEngineError("it died") if fails else [*CHAT.tokenize("fine"), *END]

    first, second = ({"role": "user", "content": name} for name in ("AAA", "BBB"))
    async with agent_of(Uneven(script)) as agent:

        async def goes_on() -> None:
            said = (await agent.chat(second)).choices[0].message
            await agent.chat(second, said, {"role": "user", "content": "more"})

        async with asyncio.TaskGroup() as scope:
            scope.create_task(goes_on())
            with pytest.raises(openai.APIStatusError):
                await agent.chat(first)
        if repeats:
            await agent.chat(first)
        collected = await agent.collect()
    assert (collected.failure is None) is repeats


@pytest.mark.parametrize(("then", "stays"), [("other", True), ("again", False), ("new", False)])
async def test_the_failure_of_an_agent_stays_while_another_one_continues(then: str, stays: bool) -> None:
    """Though their requests are never under way together."""

    def script(call: int, input_ids: Sequence[int]) -> list[int] | Exception:
        return TransientEngineError("it died") if call == 2 else [*CHAT.tokenize("fine"), *END]

    first, second, more = ({"role": "user", "content": text} for text in ("AAA", "BBB", "more"))
    async with agent_of(ScriptedModel(script)) as agent:
        said = (await agent.chat(first)).choices[0].message
        await agent.chat(second)
        with pytest.raises(openai.APIStatusError):
            await agent.chat(first, said, more)
        asked = {"other": [second, said, more], "again": [first, said, more], "new": [more]}
        await agent.chat(*asked[then])
        assert ((await agent.collect()).failure is not None) is stays


async def test_parallel_requests_become_branches() -> None:
    model = ScriptedModel(lambda call, input_ids: [*CHAT.tokenize(f"answer {call}"), *END], seconds=0.05)
    async with agent_of(model) as agent:
        await asyncio.gather(*(agent.chat({"role": "user", "content": f"part {n}"}) for n in range(3)))
        collected = await agent.collect()
    assert len(collected.sample.branches) == 3
    assert all(branch.loss_mask.any() for branch in collected.sample.branches)
