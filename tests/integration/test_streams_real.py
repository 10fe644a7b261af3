"""Streams of the session server with a real engine behind the real router: tokens are shown before it has finished.

# covers: M13, C12
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from miles_async.arguments import EnginesArguments, WeightsArguments
from miles_async.arguments.weights import PauseMode
from miles_async.engines.registry import EngineState
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.stack import FrozenEngines
from miles_async.engines.supervisor import EngineGroup
from miles_async.runtime.network.addresses import LOCAL
from miles_async.types import Sample
from tests.fakes.chat_formats import chat_format
from tests.fakes.session_agents import QUESTION, agent_of
from tests.integration.served_models import reference_logprobs, served_spec
from tests.integration.tiny_models import save_tiny

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420), pytest.mark.asyncio(loop_scope="module")]

START_SECONDS = 300.0
LONG = {"max_response": 600, "max_total": 1000, "sampling": {"temperature": 1.0, "ignore_eos": True}}


@dataclass
class Served:
    """An engine with random weights."""

    stack: FrozenEngines
    model: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, engine_imports: Path) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("streams")
    tokenizer = chat_format("qwen3").tokenizer
    model = save_tiny("qwen3-tied", folder / "model", vocab_size=len(tokenizer), max_position_embeddings=4096)
    tokenizer.save_pretrained(model)
    spec = served_spec(model, folder, engine_imports, start_timeout=START_SECONDS, weight_version=0)
    stack = FrozenEngines(
        [EngineGroup(engines=1, streams=True, launch=partial(ServerProcess, SGLANG, spec))],
        EnginesArguments(request_retries=0),
        WeightsArguments(),
        log_dir=folder,
        network=LOCAL,
        calls=SGLangServer,
    )
    await stack.start()
    supervision = asyncio.ensure_future(stack.supervise())
    async with asyncio.timeout(START_SECONDS):
        await stack.registry.wait_until(lambda: len(stack.registry.in_state(EngineState.SERVING)) == 1)
    yield Served(stack, model)
    supervision.cancel()
    await asyncio.gather(supervision, return_exceptions=True)
    await stack.stop()


async def in_the_middle(served: Served, act: Callable[[], Awaitable[None]]) -> tuple[Sample, str]:
    """Act once text of a stream has come while its engine still samples. Returns the sample, and all text that came.

    Text from what may be the beginning of a tool call on is held back. Where random weights begin with such a token,
    all text comes at the end: then another answer is asked for.
    """
    while True:
        shown, acted = "", False
        async with agent_of(served.stack.client, **LONG) as agent:
            async for chunk in await agent.chat(QUESTION, stream=True):
                delta = chunk.choices[0].delta
                text = delta.content or getattr(delta, "reasoning_content", None) or ""
                if text and not acted and served.stack.client.in_flight:
                    await act()
                    acted = True
                shown += text
            sample = (await agent.collect()).sample
        if acted:
            assert sample is not None
            return sample, shown


def check(served: Served, sample: Sample, shown: str) -> None:
    """Check that a sample of one turn has the text that was shown, and what an engine sampled."""
    (message,) = sample.metadata["messages"][-1:]
    assert shown == message.get("reasoning_content", "") + message["content"]
    expected = reference_logprobs(served.model, sample.tokens.tolist())[sample.prompt_length - 1 :]
    said = sample.rollout_logprobs[sample.prompt_length :]
    assert np.abs(said - expected).max() < 1e-4


async def test_text_comes_while_it_is_sampled_and_the_tokens_are_those_that_were(served: Served) -> None:
    async with asyncio.timeout(240):
        sample, shown = await in_the_middle(served, partial(asyncio.sleep, 0))
    check(served, sample, shown)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_publication_in_the_middle_goes_unnoticed(served: Served, mode: PauseMode) -> None:  # covers: M11
    server, url = served.stack.server, served.stack.registry.urls()[0]

    async def publish() -> None:
        await server.pause(url, mode, 30.0)
        await server.resume(url, 30.0)

    async with asyncio.timeout(240):
        sample, shown = await in_the_middle(served, publish)
    check(served, sample, shown)
    assert sample.metadata["chunks"] == (2 if mode == "abort" else 1)


async def test_an_agent_that_hangs_up_ends_the_request_at_the_engine(served: Served) -> None:
    url = served.stack.registry.urls()[0]
    async with asyncio.timeout(240), agent_of(served.stack.client, max_response=3000, max_total=4000) as agent:
        stream = await agent.chat(QUESTION, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        while served.stack.client.in_flight:  # noqa: ASYNC110, the client tells nobody
            await asyncio.sleep(0.05)
        while (await served.stack.server.load(url, 10.0)).running:  # noqa: ASYNC110, nor does the engine
            await asyncio.sleep(0.05)
