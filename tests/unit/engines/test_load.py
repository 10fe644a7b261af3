"""The load of engines: who is asked, who is left out, what answers become.

# covers: C4
"""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_async.engines import load
from miles_async.engines.http import Http
from miles_async.engines.load import Loads
from miles_async.engines.registry import EngineRegistry, EngineState
from miles_async.engines.sglang.api import SGLangServer
from miles_async.errors import EngineError
from miles_async.types import EngineLoad
from tests.fakes.clients import registry_of, serving
from tests.fakes.fake_engine import KV_TOKENS, FakeEngine

REQUEST = {"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 10_000}}


def registry_at(*urls: str) -> EngineRegistry:
    """Engines that serve."""
    return registry_of(*(serving(url, f"engine-{index}") for index, url in enumerate(urls)))


async def test_serving_engines_are_asked_and_silent_ones_are_omitted(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C10
    monkeypatch.setattr(load, "LOAD_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, and nobody answers
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with FakeEngine() as busy, FakeEngine() as idle, FakeEngine() as paused, FakeEngine() as joining:
            urls = (busy.url, idle.url, paused.url, joining.url, silent_url, "http://127.0.0.1:1")
            await _check_asked_engines(http, busy, registry_at(*urls))


async def _check_asked_engines(http: Http, busy: FakeEngine, registry: EngineRegistry) -> None:
    registry.engines["engine-2"].paused = True
    registry.engines["engine-3"].state = EngineState.JOINING
    request = asyncio.ensure_future(_post(http, busy.url))
    while not busy.running:  # noqa: ASYNC110, the fake tells nobody
        await asyncio.sleep(0.001)
    async with asyncio.timeout(50):
        loads = await Loads(registry, SGLangServer(http)).loads()
    assert set(loads) == {"engine-0", "engine-1"}
    assert loads["engine-1"] == EngineLoad(running=0, waiting=0, kv_use=0.0)
    assert (loads["engine-0"].running, loads["engine-0"].waiting) == (1, 0)
    assert 4 / KV_TOKENS <= loads["engine-0"].kv_use < 0.5
    request.cancel()


async def _post(http: Http, url: str) -> None:
    async with http.session.post(url + "/generate", json=REQUEST) as response:
        await response.read()


async def test_the_number_that_serve_is_told_when_it_changes() -> None:
    registry = registry_at("a", "b")
    loads = Loads(registry, SGLangServer(Http()))
    assert await loads.serving(0) == 2
    waiting = asyncio.ensure_future(loads.serving(2))
    registry.engines["engine-0"].paused = True
    registry.notify()
    await asyncio.sleep(0.001)
    assert not waiting.done()
    registry.engines["engine-0"].state = EngineState.FENCED
    registry.notify()
    assert await waiting == 1


def scheduler(running: int, waiting: int, usage: float) -> dict[str, object]:
    return {"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": usage, "dp_rank": 0}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"loads": [scheduler(3, 1, 0.25)]}, EngineLoad(running=3, waiting=1, kv_use=0.25)),
        ({"loads": [scheduler(3, 1, 0.25), scheduler(5, 2, 0.75)]}, EngineLoad(running=8, waiting=3, kv_use=0.75)),
        ({"loads": []}, "found none yet"),
        ({"loads": [{"num_running_reqs": 3}]}, "unexpected answer"),
    ],
)
async def test_schedulers_of_one_engine_add_up(http: Http, answer: object, expected: EngineLoad | str) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get("/v1/loads", respond)
    async with TestServer(app) as server:
        url = f"http://{server.host}:{server.port}"
        if isinstance(expected, EngineLoad):
            assert await SGLangServer(http).load(url, 5.0) == expected
        else:
            with pytest.raises(EngineError, match=expected):
                await SGLangServer(http).load(url, 5.0)
