"""Sessions stay with one engine, which has their prefix in its cache: two real servers behind the real router."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from miles_async.arguments import EnginesArguments, WeightsArguments
from miles_async.engines.client import ROUTED_WORKER, ROUTING_KEY
from miles_async.engines.registry import EngineState
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.stack import FrozenEngines
from miles_async.engines.supervisor import EngineGroup
from miles_async.runtime.network.addresses import LOCAL
from tests.integration.real_run import command_line
from tests.integration.served_models import save_served, served_spec
from tests.integration.tiny_models import VOCAB

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420), pytest.mark.asyncio(loop_scope="module")]

START_SECONDS = 300.0
TURNS = 8
NEW_TOKENS, ANSWER_TOKENS = 12, 8  # per turn
chance = random.Random(0)


@dataclass
class Conversation:
    """One that grows by a message and an answer per turn."""

    engines: FrozenEngines
    key: str
    tokens: list[int] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    async def turn(self, key: str | None = None) -> None:
        self.tokens += chance.choices(range(4, VOCAB), k=NEW_TOKENS)
        body = {"input_ids": self.tokens, "sampling_params": {"max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}}
        reply, worker = await self._ask(body, key or self.key)
        self.workers.append(worker)
        self.tokens += reply["output_ids"]
        self.prompt_tokens += reply["meta_info"]["prompt_tokens"]
        self.cached_tokens += reply["meta_info"]["cached_tokens"]

    async def _ask(self, body: object, key: str) -> tuple[Any, str]:
        """Tried again while the router still knows an engine that has just died, as our client does."""
        url = f"{self.engines.router.url}/generate"
        async with asyncio.timeout(60):
            while True:
                async with self.engines.http.session.post(url, json=body, headers={ROUTING_KEY: key}) as response:
                    if response.status == 200:
                        return await response.json(), response.headers[ROUTED_WORKER]
                await asyncio.sleep(0.1)

    @property
    def hit_rate(self) -> float:
        """Of the tokens that an earlier turn had."""
        return self.cached_tokens / (self.prompt_tokens - TURNS * NEW_TOKENS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory, engine_imports: Path) -> AsyncIterator[FrozenEngines]:
    folder = tmp_path_factory.mktemp("affinity")
    model = save_served("qwen3-tied", folder / "model", seed=0)
    spec = served_spec(model, folder, engine_imports, start_timeout=START_SECONDS)
    stack = FrozenEngines(
        [EngineGroup(engines=2, streams=True, launch=partial(ServerProcess, SGLANG, spec))],
        EnginesArguments(),
        WeightsArguments(),
        log_dir=folder,
        network=LOCAL,
        calls=SGLangServer,
    )
    await stack.start()
    supervision = asyncio.ensure_future(stack.supervise())
    await until_serving(stack, 2)
    yield stack
    supervision.cancel()
    await asyncio.gather(supervision, return_exceptions=True)
    await stack.stop()
    assert not [each for each in psutil.process_iter() if str(model) in " ".join(command_line(each))]


async def until_serving(stack: FrozenEngines, count: int) -> None:
    async with asyncio.timeout(START_SECONDS):
        await stack.registry.wait_until(lambda: len(stack.registry.in_state(EngineState.SERVING)) == count)


async def test_a_session_finds_its_prefix_and_random_routing_does_not(engines: FrozenEngines) -> None:
    # covers: M13, M14
    sticky = [Conversation(engines, f"session-{i}") for i in range(6)]
    strewn = [Conversation(engines, f"other-{i}") for i in range(6)]
    for turn in range(TURNS):
        for conversation in sticky:
            await conversation.turn()
        for i, conversation in enumerate(strewn):
            await conversation.turn(key=f"{i}-{turn}")
    assert all(len(set(conversation.workers)) == 1 for conversation in sticky)
    others = [Conversation(engines, f"short-{i}") for i in range(20)]  # six alone hash to one engine in every 32nd run
    for conversation in others:
        await conversation.turn()
    assert len({conversation.workers[0] for conversation in sticky + others}) == 2, "sessions spread"
    with_key = sum(c.hit_rate for c in sticky) / len(sticky)
    without = sum(c.hit_rate for c in strewn) / len(strewn)
    assert with_key > 0.8, (with_key, without)
    assert with_key > without + 0.1, (with_key, without)  # two engines and eight turns: half of a prefix is anywhere


async def test_a_session_moves_when_its_engine_dies_and_stays_with_one_when_it_is_back(engines: FrozenEngines) -> None:
    # covers: M13, A3
    conversation = Conversation(engines, "survivor")
    await conversation.turn()
    home = conversation.workers[0]
    record = engines.registry.answering_at(home)
    assert record is not None
    handle: Any = engines.supervisor.handle(record.engine_id)
    psutil.Process(await handle.pid()).kill()
    await until_serving(engines, 1)
    await conversation.turn()
    assert conversation.workers[1] != home
    await until_serving(engines, 2)
    for _ in range(3):
        await conversation.turn()
    assert len(set(conversation.workers[2:])) == 1
