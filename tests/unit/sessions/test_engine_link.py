"""Requests of the session server reach the rollout process's client as they are, and generations come back so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from miles_async.api import EngineClient
from miles_async.errors import NoRoomError, RequestRejectedError, TransientEngineError
from miles_async.sessions.engine_link import Alive, EngineLink, serve_engines
from miles_async.types import GenerateRequest, Generation
from tests.fakes.scripted_model import ScriptedModel
from tests.waiting import until

REQUEST = GenerateRequest(
    input_ids=np.array([5, 6], np.int32), sampling={"max_new_tokens": 2, "temperature": 1.0}, routing_key="1-0"
)


@asynccontextmanager
async def linked(
    client: EngineClient, path: Path, on_alive: Callable[[Alive], None] = lambda alive: None
) -> AsyncIterator[tuple[EngineLink, asyncio.Future[None], Callable[[], Awaitable[None]]]]:
    """(the session server's end, its reception, what stops the rollout process's end)."""
    stop = await serve_engines(client, on_alive, path / "socket")
    link = await EngineLink.connect(path / "socket")
    reception = asyncio.ensure_future(link.receive())
    try:
        yield link, reception, stop
    finally:
        reception.cancel()
        await asyncio.gather(reception, return_exceptions=True)
        await link.close()
        await stop()


class Hanging:
    """An EngineClient that never answers, and tells when it is given up."""

    def __init__(self) -> None:
        self.asked, self.given_up = asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()
        raise AssertionError


async def test_arrays_cross_the_link_as_they_are(tmp_path: Path) -> None:  # covers: C12
    model = ScriptedModel(lambda call, input_ids: [7, 8, 9], version=3)
    async with linked(model, tmp_path) as (link, *_):
        generation = await link.generate(REQUEST)
    assert (model.requests, model.sampling, model.routing_keys) == ([[5, 6]], [dict(REQUEST.sampling)], ["1-0"])
    expected = await ScriptedModel(lambda call, input_ids: [7, 8, 9], version=3).generate(REQUEST)
    assert (generation.output_ids.dtype, generation.output_ids.tolist()) == (np.int32, expected.output_ids.tolist())
    assert generation.logprobs.tobytes() == expected.logprobs.tobytes()
    assert generation.weight_versions.tolist() == expected.weight_versions.tolist()


async def test_requests_share_a_connection_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    class Echo:
        async def generate(self, request: GenerateRequest) -> Generation:
            await asyncio.sleep(0.02 * (9 - int(request.input_ids[0])))  # the last one is answered first
            return await ScriptedModel(lambda call, input_ids: input_ids[:1]).generate(request)

    async with linked(Echo(), tmp_path) as (link, *_):
        requests = [
            GenerateRequest(input_ids=np.array([n], np.int32), sampling={"max_new_tokens": 2}, routing_key="k")
            for n in range(10)
        ]
        answers = await asyncio.gather(*map(link.generate, requests))
    assert [answer.output_ids.tolist() for answer in answers] == [[n] for n in range(10)]


async def test_an_answer_larger_than_any_buffer_crosses_whole(tmp_path: Path) -> None:
    many = list(range(500_000))
    model = ScriptedModel(lambda call, input_ids: many)
    async with linked(model, tmp_path) as (link, *_):
        request = GenerateRequest(
            input_ids=np.array(many, np.int32), sampling={"max_new_tokens": len(many)}, routing_key="k"
        )
        assert (await link.generate(request)).output_ids.tolist() == many
    assert model.requests == [many]


@pytest.mark.parametrize("error", [NoRoomError("too long"), RequestRejectedError("HTTP 413: too long")])
async def test_an_error_of_the_client_is_raised_as_what_it_was(tmp_path: Path, error: Exception) -> None:
    async with linked(ScriptedModel(lambda call, input_ids: error), tmp_path) as (link, *_):
        with pytest.raises(type(error), match=str(error)):
            await link.generate(REQUEST)


async def test_a_request_that_nobody_foresaw_fails_alone(tmp_path: Path) -> None:
    model = ScriptedModel(lambda call, input_ids: ZeroDivisionError("x") if call == 0 else [7])
    async with linked(model, tmp_path) as (link, *_):
        with pytest.raises(TransientEngineError, match="ZeroDivisionError"):
            await link.generate(REQUEST)
        assert (await link.generate(REQUEST)).output_ids.tolist() == [7]


async def test_a_request_that_is_given_up_here_ends_there(tmp_path: Path) -> None:  # covers: M13
    client = Hanging()
    async with linked(client, tmp_path) as (link, *_), asyncio.timeout(10):
        asking = asyncio.ensure_future(link.generate(REQUEST))
        await client.asked.wait()
        asking.cancel()
        await client.given_up.wait()


async def test_requests_end_with_the_connection_at_both_ends(tmp_path: Path) -> None:  # covers: M13
    client = Hanging()
    async with linked(client, tmp_path) as (link, reception, stop), asyncio.timeout(10):
        asking = asyncio.ensure_future(link.generate(REQUEST))
        await client.asked.wait()
        await stop()  # the rollout process's end
        assert client.given_up.is_set()
        for call in (asking, reception, link.generate(REQUEST)):
            with pytest.raises(TransientEngineError, match="the rollout process does not answer"):
                await call
    with pytest.raises(TransientEngineError, match="the rollout process does not answer"):
        await EngineLink.connect(tmp_path / "elsewhere")

    client = Hanging()
    (tmp_path / "other").mkdir()
    async with linked(client, tmp_path / "other") as (link, *_), asyncio.timeout(10):
        asking = asyncio.ensure_future(link.generate(REQUEST))
        await client.asked.wait()
        await link.close()  # the session server's end
        await client.given_up.wait()
        asking.cancel()


async def test_signs_of_life_are_told(tmp_path: Path) -> None:
    told = asyncio.Queue[Alive]()
    alive = Alive(instance_id="i", url="http://x", began={"s": 5})
    async with linked(Hanging(), tmp_path, told.put_nowait) as (link, *_), asyncio.timeout(10):
        await link.report(alive)
        assert await told.get() == alive


# --------------------------------------------------------------------------------------------------- streams
async def test_tokens_cross_the_link_before_the_answer(tmp_path: Path) -> None:  # covers: M13
    model, came = ScriptedModel(lambda call, input_ids: [7, 8], version=3), asyncio.Queue[tuple[int, list[int]]]()
    finish = model.holds[1] = asyncio.Event()
    async with linked(model, tmp_path) as (link, *_), asyncio.timeout(10):
        asking = asyncio.ensure_future(link.stream(REQUEST, lambda at, ids: came.put_nowait((at, [*ids]))))
        assert await came.get() == (0, [7])
        assert not asking.done()
        finish.set()
        assert (await asking).output_ids.tolist() == [7, 8]
        assert await came.get() == (1, [8])


async def test_a_stream_that_cannot_go_on_here_ends_there(tmp_path: Path) -> None:  # covers: M13
    def said(at: int, token_ids: Sequence[int]) -> None:
        raise TransientEngineError("it was shown")

    model = ScriptedModel(lambda call, input_ids: [7, 8])
    model.holds[1] = asyncio.Event()
    async with linked(model, tmp_path) as (link, *_), asyncio.timeout(10):
        with pytest.raises(TransientEngineError, match="it was shown"):
            await link.stream(REQUEST, said)
        await until(lambda: model.given_up)


async def test_a_client_that_does_not_stream_answers_as_a_whole(tmp_path: Path) -> None:
    class Whole:
        async def generate(self, request: GenerateRequest) -> Generation:
            return await ScriptedModel(lambda call, input_ids: [7, 8]).generate(request)

    def said(at: int, token_ids: Sequence[int]) -> None:
        raise AssertionError

    async with linked(Whole(), tmp_path) as (link, *_):
        assert (await link.stream(REQUEST, said)).output_ids.tolist() == [7, 8]
