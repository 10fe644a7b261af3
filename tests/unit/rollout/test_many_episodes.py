"""200 episodes at once, of two turns each: none is lost or counted twice, all are closed, and nothing is left of them.

# covers: C2, R3
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import aiohttp
import gymnasium
import psutil

from miles_async.integrations.gymnasium_text import GymnasiumText
from miles_async.rollout.agent import AgentGenerate
from miles_async.rollout.multi_turn import MultiTurnGenerate
from miles_async.runtime.services import Circuit
from miles_async.trajectory.taker import Limits
from miles_async.types import (
    AssistantTurn,
    Attempt,
    GenerateRequest,
    Generation,
    Group,
    JsonObject,
    Observation,
    Prompt,
    Sample,
)
from miles_async.wiring.generation import SessionsOfRun
from tests.fakes.keys import KEYS
from tests.fakes.session_agents import CHAT, END, make_trajectory
from tests.property.builders import make_generation
from tests.unit.rollout.test_dispatcher import Bench, running
from tests.unit.sessions.test_service import Workers, service_of

GROUPS, SAMPLES = 4, 50  # as many groups as the pool has room for before anything is trained
EPISODES = GROUPS * SAMPLES
LIMITS = Limits(response=500, total=900)
Generating = Callable[[Any, Attempt, int], Awaitable[Sample]]


class Model:
    """Says something else in each turn of each episode, and remembers it."""

    def __init__(self) -> None:
        self.said: defaultdict[str, list[list[int]]] = defaultdict(list)  # by routing key

    async def generate(self, request: GenerateRequest) -> Generation:
        turns = self.said[request.routing_key]
        said = [*CHAT.tokenize(f"turn {len(turns)} of {request.routing_key}"), *END]
        turns.append(said)
        await asyncio.sleep(0)
        return make_generation(said, engines=("engine-0",), prompt_tokens=len(request.input_ids))


class Questions:
    """An endless source."""

    def __init__(self, asked: Callable[[int], JsonObject]) -> None:
        self._asked = asked
        self._taken = 0

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        first, self._taken = self._taken, self._taken + count
        return [(0, Prompt(prompt_id=f"p{n}", token_ids=(1,), **self._asked(n))) for n in range(first, self._taken)]

    def state(self) -> JsonObject:
        return {}


def question(number: int) -> JsonObject:
    return {"text": f"question {number}"}


async def played(generate: Generating, model: Model, asked: Callable[[int], JsonObject] = question) -> None:
    """Play the episodes of two batches, and train them."""
    bench = Bench(
        around=lambda _, client, attempt, index: generate(model, attempt, index),
        source=Questions(asked),
        n_samples_per_prompt=SAMPLES,
        total_groups=GROUPS,
        stall_timeout=60.0,
    )
    groups: list[Group] = []
    async with asyncio.timeout(100), running(bench):
        for version in (1, 2):
            groups += await bench.dispatcher.cut(version - 1)
            await bench.publish(version)
    assert len({group.attempt.attempt_id for group in groups}) == GROUPS
    assert sum(len(group.samples) for group in groups) == EPISODES
    trained = sorted(sample.tokens[sample.loss_mask == 1].tolist() for group in groups for sample in group.samples)
    assert trained == sorted([*chain(*turns)] for turns in model.said.values())
    assert all(not sample.more_branches for group in groups for sample in group.samples)
    assert bench.balance()["failed"] == 0


def in_use() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {"files": process.num_fds(), "threads": threading.active_count(), "tasks": len(asyncio.all_tasks())}


@contextmanager
def nothing_left() -> Iterator[dict[str, int]]:
    """What was in use before is in use afterwards, but for the loop's threads, of which it keeps a few."""
    before = in_use()
    yield before
    after = in_use()
    assert after["tasks"] == before["tasks"]
    assert after["files"] <= before["files"] + 4
    assert after["threads"] <= before["threads"] + 40


class Gathering:
    """An environment whose first step waits until all others are in theirs."""

    opened = closed = 0
    all_in: asyncio.Event

    def __init__(self, prompt: Prompt) -> None:
        type(self).opened += 1

    def tools(self) -> Sequence[Mapping[str, object]]:
        return ()

    async def step(self, turn: AssistantTurn) -> Observation:
        if turn.index == 0:
            if self.opened == EPISODES:
                self.all_in.set()
            await self.all_in.wait()
            return Observation(messages=({"role": "user", "content": "again"},))
        return Observation(done=True, reward=1.0)

    async def close(self) -> None:
        type(self).closed += 1


def with_environment(make: Any) -> MultiTurnGenerate:
    return MultiTurnGenerate(
        make_environment=make,
        make_trajectory=make_trajectory,
        sampling={"temperature": 1.0},
        limits=LIMITS,
        max_turns=4,
        step_timeout=90.0,
        service=Circuit("environment"),
    )


async def test_episodes_with_an_environment_run_at_once_and_are_closed() -> None:
    Gathering.opened = Gathering.closed = 0
    Gathering.all_in = asyncio.Event()
    with nothing_left():
        await played(with_environment(Gathering), Model())
    assert Gathering.opened == Gathering.closed == EPISODES


class Blocking(gymnasium.Env):
    """Steps block in their threads until all are in one."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(60, charset="abcdefghijklmnopqrstuvwxyz0123456789- ")
    opened, closed = 0, 0
    together: threading.Barrier
    counting = threading.Lock()

    def __init__(self) -> None:
        with self.counting:
            type(self).opened += 1
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return f"question {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        if self._steps == 1:
            self.together.wait(60)
        return "again", 0.5, self._steps == 2, False, {}

    def close(self) -> None:
        with self.counting:
            type(self).closed += 1


async def test_steps_that_block_have_a_thread_each_which_ends() -> None:
    gymnasium.register("Blocking-v0", entry_point=Blocking)
    make = GymnasiumText("Blocking-v0", {})  # makes one, to look at its spaces
    Blocking.opened = Blocking.closed = 0
    Blocking.together = threading.Barrier(EPISODES)
    with nothing_left():
        asked = lambda number: {"text": f"question {number}", "metadata": {"seed": number}}  # noqa: E731
        await played(with_environment(make), Model(), asked)
    del gymnasium.registry["Blocking-v0"]
    assert Blocking.opened == Blocking.closed == EPISODES


async def test_sessions_of_agents_are_opened_at_once_and_ended() -> None:
    model, all_in, ended = Model(), asyncio.Event(), Counter[str]()
    urls: set[str] = set()

    async def agent(base_url: str, prompt: Prompt) -> tuple[int, float]:
        urls.add(base_url)
        conversation: list[Any] = [{"role": "user", "content": prompt.text}]
        async with aiohttp.ClientSession(headers=KEYS.sessions.agents.headers()) as http:
            for _ in range(2):
                body = {"model": "policy", "messages": conversation}
                async with http.post(f"{base_url}/chat/completions", json=body) as response:
                    answer = await response.json()
                conversation += [answer["choices"][0]["message"], {"role": "user", "content": "again"}]
                if len(urls) == EPISODES:
                    all_in.set()
                await all_in.wait()
        ended[base_url] += 1
        return 2, 1.0

    with nothing_left():
        async with service_of(Workers(), model, seconds=100) as (service, _):
            opened = SessionsOfRun(service, {"temperature": 1.0}, LIMITS, False)
            await played(AgentGenerate(sessions=opened, run_agent=agent, timeout=90.0), model)
            assert len(ended) == len(urls) == EPISODES
            assert await open_sessions(service.workers[0].url) == 0


async def open_sessions(url: str | None) -> int:
    async with (
        aiohttp.ClientSession(headers=KEYS.sessions.agents.headers()) as http,
        http.get(f"{url}/health") as answer,
    ):
        return (await answer.json())["open_sessions"]
