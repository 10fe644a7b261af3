"""Log-probs of given tokens: engines take turns, and each failure is what a caller of services expects."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from miles_async.engines.http import Http
from miles_async.engines.scoring import EngineScorer
from miles_async.engines.sglang.api import SGLangServer
from miles_async.errors import OverdueError, RequestRejectedError, ServiceUnavailableError
from tests.fakes.clients import registry_of, serving
from tests.fakes.fake_engine import FakeEngine


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    async with FakeEngine() as one, FakeEngine() as other:
        yield [one, other]


def scorer(http: Http, engines: list[FakeEngine], timeout: float = 5.0) -> EngineScorer:
    registry = registry_of(*(serving(engine.url, f"teacher-{number}") for number, engine in enumerate(engines)))
    return EngineScorer(SGLangServer(http), registry, timeout=timeout, at_once=2)


async def test_engines_score_in_turn_what_was_asked_for(http: Http, engines: list[FakeEngine]) -> None:
    engines[1].canary_shift = -1.0
    score = scorer(http, engines)
    assert [(await score([5, 6, 7, 8], 2)).tolist() for _ in range(3)] == [[-1.0, -1.0], [-2.0, -2.0], [-1.0, -1.0]]
    assert engines[0].requests[0]["sampling_params"]["max_new_tokens"] == 0
    assert engines[0].requests[0]["logprob_start_len"] == 1  # what is before may come from the cache


async def test_an_engine_that_packs_nothing_is_understood(http: Http, engines: list[FakeEngine]) -> None:
    """One that others launched."""
    engines[0].packs = False
    score = scorer(http, engines[:1])
    assert (await score([5, 6, 7, 8], 1)).tolist() == [-1.0] * 3
    assert engines[0].requests[0]["packed_scores"] is True


async def test_no_engine_is_no_fault_of_the_sample(http: Http) -> None:
    with pytest.raises(ServiceUnavailableError, match="no engine is up: no engines"):
        await scorer(http, [])([1, 2], 1)


@pytest.mark.parametrize(("status", "error"), [(400, RequestRejectedError), (503, ServiceUnavailableError)])
async def test_refusals_are_told_from_failures(
    status: int, error: type[Exception], http: Http, engines: list[FakeEngine]
) -> None:
    engines[0].respond = lambda body: web.Response(status=status, text="no such token")
    with pytest.raises(error, match="no such token"):
        await scorer(http, engines)([1, 2], 1)


async def test_silence_is_overdue(http: Http, engines: list[FakeEngine]) -> None:
    engines[0].silent = {"/generate"}
    with pytest.raises(OverdueError, match=r"no answer within 0\.05 s"):
        await scorer(http, engines, timeout=0.05)([1, 2], 1)
