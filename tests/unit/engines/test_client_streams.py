"""Generation that is streamed: tokens are told as they come, and the answer at the end is the one that counts.

# covers: M13, C8, A3
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from aiohttp import web

from miles_async.engines.client import RouterClient
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry, EngineState
from miles_async.errors import RequestRejectedError, TransientEngineError
from miles_async.types import GenerateRequest
from tests.fakes.clients import client_of, registry_of, serving
from tests.fakes.fake_engine import FakeEngine
from tests.json_dict import JsonDict

REQUEST = GenerateRequest(input_ids=np.array([5, 6, 7], np.int32), sampling={"max_new_tokens": 4}, routing_key="a")
SAID = [3, 4, 5, 6]  # by a FakeEngine


class Told:
    """An ``OnTokens`` that notes its tokens. Tokens must be taken back before others are told in their place."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.restarts = 0

    def __call__(self, at: int, token_ids: Sequence[int]) -> None:
        assert at == (len(self.token_ids) if token_ids else 0)
        self.restarts += not token_ids
        self.token_ids = [*self.token_ids[:at], *token_ids]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(weight_version="3") as engine:
        yield engine


@pytest.fixture
def registry(engine: FakeEngine) -> EngineRegistry:
    return registry_of(serving(engine.url), version=3)


@pytest.fixture
def client(http: Http, engine: FakeEngine, registry: EngineRegistry) -> RouterClient:
    return client_of(http, registry, lambda: engine.url, retries=2)


@pytest.mark.parametrize("packs", [True, False])
async def test_a_stream_gives_what_an_answer_gives(client: RouterClient, engine: FakeEngine, packs: bool) -> None:
    engine.packs = packs
    told, expected = Told(), await client.generate(REQUEST)
    generation = await client.stream(REQUEST, told)
    assert told.token_ids == SAID[: len(told.token_ids)]
    for name in ("output_ids", "logprobs", "weight_versions"):
        assert getattr(generation, name).tolist() == getattr(expected, name).tolist()
    assert (generation.finish_reason, generation.engines) == (expected.finish_reason, expected.engines)
    assert [request.get("stream") for request in engine.requests] == [None, True]


@pytest.mark.parametrize("packs", [True, False])
async def test_tokens_are_told_before_the_engine_has_finished(
    client: RouterClient, engine: FakeEngine, packs: bool
) -> None:
    engine.packs, engine.token_seconds = packs, 0.1
    told = Told()
    async with asyncio.timeout(30), asyncio.TaskGroup() as scope:
        task = scope.create_task(client.stream(REQUEST, told))
        while not told.token_ids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not task.done()
    assert told.token_ids == SAID[: len(told.token_ids)]


async def test_tokens_of_an_engine_that_is_not_verified_wait(
    client: RouterClient, engine: FakeEngine, registry: EngineRegistry
) -> None:
    told, record = Told(), registry.engines["engine-0"]
    engine.token_seconds = 0.02
    async with asyncio.timeout(30), asyncio.TaskGroup() as scope:
        task = scope.create_task(client.stream(REQUEST, told))
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        record.verified = False
        told_then = len(told.token_ids)
        await asyncio.sleep(0.3)
        assert (len(told.token_ids), task.done()) == (told_then, False)
        task.cancel()


async def test_a_stream_that_breaks_begins_again(client: RouterClient, engine: FakeEngine) -> None:
    def break_first(reply: JsonDict) -> JsonDict:
        if len(engine.requests) == 1:
            reply["output_ids"] = [*reply["output_ids"], 9]  # no log-prob
        return reply

    engine.transform = break_first
    told = Told()
    assert (await client.stream(REQUEST, told)).output_ids.tolist() == SAID
    assert len(engine.requests) == 2
    assert told.restarts == 1


async def test_an_engine_that_dies_in_the_middle_is_replaced(
    client: RouterClient, engine: FakeEngine, registry: EngineRegistry
) -> None:
    engine.token_seconds = 0.05
    told = Told()
    async with FakeEngine(weight_version="3") as other, asyncio.timeout(30):
        registry.engines["engine-1"] = serving(other.url, "engine-1")
        registry.notify()
        task = asyncio.ensure_future(client.stream(REQUEST, told))
        while len(told.token_ids) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        registry.engines["engine-0"].state = EngineState.FENCED
        registry.notify()
        await engine.die()
        generation = await task
        assert generation.engines == ("engine-1",)
        assert (generation.output_ids.tolist(), told.restarts) == (SAID, 1)
        assert len(other.requests) == 1


async def test_what_was_shown_cannot_begin_again(client: RouterClient, engine: FakeEngine) -> None:
    def shown(at: int, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise TransientEngineError("it was shown")

    engine.transform = lambda reply: {**reply, "output_ids": [1]}
    with pytest.raises(TransientEngineError, match="it was shown"):
        await client.stream(REQUEST, shown)
    assert len(engine.requests) == 1


async def test_a_stream_without_an_answer_was_cut(client: RouterClient, engine: FakeEngine) -> None:
    engine.respond = lambda body: web.Response(body=b"data: [DONE]\n\n", content_type="text/event-stream")
    with pytest.raises(TransientEngineError, match="ended without an answer"):
        await client.stream(REQUEST, Told())
    assert len(engine.aborted_ids) == 3


async def test_an_engine_that_sends_new_tokens_alone_is_named_with_the_flag_to_leave_out(
    client: RouterClient, engine: FakeEngine
) -> None:
    engine.packs = False
    engine.transform = lambda reply: {**reply, "output_ids": reply["output_ids"][-1:]}
    with pytest.raises(TransientEngineError, match=r"1 of 4 tokens: .* without --incremental-streaming-output"):
        await client.stream(REQUEST, Told())


async def test_the_connection_of_a_stream_is_used_again(client: RouterClient, engine: FakeEngine) -> None:
    for _ in range(3):
        await client.stream(REQUEST, Told())
    assert len(engine.peers) == 1


@pytest.mark.parametrize(
    "event",
    [
        b'{"error": {"message": "too long", "code": 400}}',
        b'{"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "too long", '
        b'"status_code": 400}}}',
    ],
    ids=["before it began", "by the scheduler"],
)
async def test_an_error_in_a_stream_is_what_its_status_says(
    client: RouterClient, engine: FakeEngine, event: bytes
) -> None:
    headers = {"x-smg-routed-worker-id": engine.url}
    engine.respond = lambda body: web.Response(
        body=b"data: " + event + b"\n\n", content_type="text/event-stream", headers=headers
    )
    with pytest.raises(RequestRejectedError, match="HTTP 400: too long"):
        await client.stream(REQUEST, Told())


async def test_a_server_that_does_not_stream_answers_as_a_whole(client: RouterClient, engine: FakeEngine) -> None:
    engine.respond = lambda body: body.pop("stream", None) and None
    told = Told()
    assert (await client.stream(REQUEST, told)).output_ids.tolist() == SAID
    assert told.token_ids == []


async def test_a_cancelled_stream_is_aborted_at_the_engine(client: RouterClient, engine: FakeEngine) -> None:
    engine.token_seconds = 10.0
    task = asyncio.ensure_future(client.stream(REQUEST, Told()))
    async with asyncio.timeout(30):
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert engine.aborted_ids == [engine.requests[0]["rid"]]
