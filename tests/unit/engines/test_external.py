"""External engines are attached and never ended; frozen ones serve as soon as they are up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from miles_async.arguments import EnginesArguments, WeightsArguments
from miles_async.engines.external import ExternalServers
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineState
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.stack import FrozenEngines
from miles_async.engines.supervisor import EngineGroup
from miles_async.errors import EngineError, EngineStartError
from miles_async.runtime.network.addresses import LOCAL
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_fleet import FakeRouter, FakeServer


async def test_an_external_engine_is_attached_and_left_as_it_is() -> None:
    async with FakeEngine() as engine:
        handle = ExternalServers([engine.url.removeprefix("http://")], 5.0, SGLangServer)(0, 0)
        assert await handle.start() == engine.url
        with pytest.raises(EngineError, match="nothing of ours"):
            await handle.on_host(print, 0)
        api = SGLangServer(http := Http())
        await api.pause(engine.url, "retract", 5.0)
        await handle.stop()
        assert (await api.score(engine.url, (1, 2, 3), 5.0)).weight_version == "default"  # it goes on
        await http.close()
        assert await handle.start() == engine.url
    await handle.stop()  # of one that is gone


async def test_an_external_engine_that_does_not_answer_is_named() -> None:
    handle = ExternalServers(["127.0.0.1:1"], 0.05, SGLangServer)(0, 0)
    with pytest.raises(EngineStartError, match=r"external engine at http://127.0.0.1:1 did not answer for 0.05 s"):
        await handle.start()


async def test_frozen_engines_serve_when_they_are_up_and_again_when_they_are_back(tmp_path: Path) -> None:
    servers: list[FakeServer] = []

    def launch(_: int, incarnation: int) -> Any:
        servers.append(FakeServer(FakeEngine()))
        return servers[-1]

    frozen = FrozenEngines(
        [EngineGroup(name="judge", engines=1, launch=launch)],
        EnginesArguments(),
        WeightsArguments(),
        log_dir=tmp_path,
        network=LOCAL,
        calls=SGLangServer,
    )
    router = FakeRouter(frozen.registry)
    frozen.router = frozen.supervisor._router = frozen.supervisor.routing._router = router
    await frozen.start()
    supervision = asyncio.ensure_future(frozen.supervise())
    record = frozen.registry.engines["judge-0"]

    async def until_serving() -> None:
        async with asyncio.timeout(50):
            await frozen.registry.wait_until(lambda: record.state is EngineState.SERVING)

    try:
        await until_serving()
        assert router.registered == [servers[0].engine.url]
        await servers[0].crash()
        async with asyncio.timeout(50):
            await frozen.registry.wait_until(lambda: len(servers) == 2)
        await until_serving()
        assert router.registered == [servers[1].engine.url]
    finally:
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)
        await frozen.stop()
