"""A reward model behind HTTP: what is tried again, and what its trouble costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from miles_async.errors import OverdueError, RewardError, ServiceOutageError, ServiceUnavailableError
from miles_async.rewards import remote
from miles_async.rewards.remote import RemoteReward
from miles_async.runtime.services import Services
from miles_async.types import JsonObject, Prompt
from tests.fakes.environment_servers import serving
from tests.property.builders import make_sample

PROMPT = Prompt(prompt_id="p:1", token_ids=(1,), text="rev 12", label="21", metadata={"level": 3})
SAMPLE = make_sample([0], text="12")


class Server:
    """Answers the n-th request (from 0) with ``respond(n)``: a body, a status, or None for silence."""

    def __init__(self, respond: Callable[[int], object]) -> None:
        self.respond = respond
        self.requests: list[JsonObject] = []
        self.at_once = self.most_at_once = 0

    async def handle(self, request: web.Request) -> web.Response:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            self.requests.append(await request.json())
            answer = self.respond(len(self.requests) - 1)
            if answer is None:
                await asyncio.sleep(60)
            await asyncio.sleep(0.001)
            return web.Response(status=answer, text="busy") if isinstance(answer, int) else web.Response(text=answer)
        finally:
            self.at_once -= 1


@asynccontextmanager
async def reward_of(
    respond: Callable[[int], object], timeout: float = 10.0
) -> AsyncIterator[tuple[Server, RemoteReward]]:
    server, app = Server(respond), web.Application()
    app.router.add_post("/score", server.handle)
    async with serving(app) as url:
        reward = RemoteReward(f"{url}/score", timeout)
        yield server, reward
        await reward.close()


@pytest.mark.parametrize("body", ["0.25", '{"reward": 0.25, "reason": "well"}'])
async def test_the_server_gets_the_sample_and_answers_its_reward(body: str):
    async with reward_of(lambda n: body) as (server, reward):
        assert await reward(PROMPT, SAMPLE) == 0.25
    assert server.requests == [{"prompt": "rev 12", "response": "12", "label": "21", "metadata": {"level": 3}}]


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_passing_errors_are_tried_again(status: int):
    async with reward_of(lambda n: status if n < 2 else "1") as (server, reward):
        assert await Services().circuit("server").call(lambda: reward(PROMPT, SAMPLE)) == 1.0
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("answer", "message"), [(400, "status 400: b'busy'"), (422, "422"), ("no", "expected a number"), ("{}", "reward")]
)
async def test_lasting_errors_are_raised_at_once(answer: object, message: str):
    async with reward_of(lambda n: answer) as (server, reward):
        with pytest.raises(RewardError, match=message) as caught:
            await reward(PROMPT, SAMPLE)
    assert not isinstance(caught.value, ServiceUnavailableError)  # the data's failure: there is nothing to wait for
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_wrong_address_or_key_is_no_fault_of_the_sample(status: int):
    async with reward_of(lambda n: status) as (_, reward):
        with pytest.raises(ServiceUnavailableError, match=str(status)):
            await reward(PROMPT, SAMPLE)


async def test_a_server_that_never_works_ends_the_run_and_says_what_it_answered():
    # covers: C10
    async with reward_of(lambda n: 500) as (server, reward):
        circuit = Services(outage_timeout=1.0).circuit("the server")
        with pytest.raises(ServiceOutageError, match=r"the server to be back within 1 s .* status 500: b'busy'"):
            await circuit.call(lambda: reward(PROMPT, SAMPLE))
    assert 2 <= len(server.requests) <= 8  # the waits between them grow


async def test_a_server_that_hangs_is_asked_again():
    async with reward_of(lambda n: None if n == 0 else "1", timeout=2.0) as (server, reward):
        assert await Services().circuit("server").call(lambda: reward(PROMPT, SAMPLE)) == 1.0
    assert len(server.requests) == 2


async def test_a_server_that_hangs_or_is_not_there_is_down():
    async with reward_of(lambda n: None, timeout=0.2) as (_, reward):
        with pytest.raises(OverdueError, match=r"no answer for 0\.2 s"):
            await reward(PROMPT, SAMPLE)
        with pytest.raises(OverdueError):  # of the sample, though nobody else was answered: the run goes on
            await Services(max_failures=2).circuit("server").call(lambda: reward(PROMPT, SAMPLE))
    absent = RemoteReward("http://127.0.0.1:1/score", 0.6)
    with pytest.raises(ServiceUnavailableError, match="Cannot connect"):
        await absent(PROMPT, SAMPLE)
    await absent.close()


async def test_samples_wait_for_their_turn_without_their_time_running(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "_REQUESTS", 2)
    async with reward_of(lambda n: json.dumps(n)) as (server, reward):
        rewards = await asyncio.gather(*(reward(PROMPT, SAMPLE) for _ in range(20)))
    assert sorted(rewards) == list(range(20))
    assert server.most_at_once == 2
