"""The real smg over fake engines: affinity, removal, and what a request looks like when it arrives."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_async.engines.client import RouterClient
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.router import Router
from miles_async.engines.router_metrics import router_metrics
from miles_async.errors import ConfigurationError, EngineError, EngineStartError, TransientEngineError
from miles_async.types import GenerateRequest, Generation
from tests.fakes.clients import client_of, serving
from tests.fakes.fake_engine import FakeEngine

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SAMPLING = {"max_new_tokens": 2}


@dataclass
class Setup:
    engines: tuple[FakeEngine, FakeEngine]
    registry: EngineRegistry
    router: Router
    client: RouterClient

    def generate(
        self, input_ids: Sequence[int] = (5,), key: str = "a", **sampling: float
    ) -> Coroutine[Any, Any, Generation]:
        request = GenerateRequest(
            input_ids=np.array(input_ids, np.int32), sampling={**SAMPLING, **sampling}, routing_key=key
        )
        return self.client.generate(request)


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    registry, http = EngineRegistry(version=1), Http()
    router = Router(registry, http, log_dir=tmp_path)
    async with (
        FakeEngine(weight_version="1", name_worker=False) as first,
        FakeEngine(weight_version="1", name_worker=False) as second,
    ):
        await router.start()
        for index, engine in enumerate((first, second)):
            await router.add(engine.url)
            registry.engines[f"engine-{index}"] = serving(engine.url, f"engine-{index}")
        registry.notify()

        client = client_of(http, registry, lambda: router.url, retries=2)
        try:
            yield Setup((first, second), registry, router, client)
        finally:
            await router.stop()
            await http.close()


async def test_a_key_stays_with_its_engine_and_keys_spread(setup: Setup) -> None:  # covers: M13
    async def engine_of(key: str) -> str:
        return (await setup.generate([5, 6], key=key)).engines[0]

    homes = {key: await engine_of(key) for key in map(str, range(24))}
    assert set(homes.values()) == {"engine-0", "engine-1"}
    assert {key: await engine_of(key) for key in homes} == homes


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            monkeypatch.setenv(variable, "http://127.0.0.1:9")


async def test_a_proxy_of_the_environment_is_not_asked(dead_proxy: None, setup: Setup) -> None:  # covers: A6
    assert (await setup.generate([5, 6])).engines[0] in ("engine-0", "engine-1")


async def test_its_own_metrics_are_read(setup: Setup) -> None:
    for key in map(str, range(6)):
        await setup.generate([5, 6], key=key)
    http = Http()
    async with http.session.get(setup.router.metrics_url) as response:
        found = router_metrics(await response.text())
    await http.close()
    assert (found["workers"], found["requests"], found["failed_requests"], found["affinity"]) == (2, 6, 0, 1)
    assert 0 < found["request_seconds/mean"] < 240
    assert found["resident_bytes"] > 1 << 20


async def test_all_fields_of_a_request_arrive(setup: Setup) -> None:
    await setup.generate([5, 6], top_k=7)
    (body,) = setup.engines[0].requests + setup.engines[1].requests
    assert body["extra_key"] == "v1"
    assert body["sampling_params"] == {"max_new_tokens": 2, "top_k": 7}
    assert body["return_logprob"] is True


async def test_a_removed_engine_gets_nothing_more(setup: Setup) -> None:
    await setup.router.remove(setup.engines[0].url)
    async with asyncio.timeout(60):  # smg removes in the background; answers of that time are refused by the client
        while any(worker.url == setup.engines[0].url for worker in await setup.router.workers()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    for key in map(str, range(8)):
        await setup.generate(key=key)
    assert setup.engines[0].requests == []
    await setup.router.remove(setup.engines[0].url)  # again: no-op


async def test_requests_of_a_dead_engine_go_to_the_other(setup: Setup) -> None:  # covers: A3
    await setup.engines[0].die()  # nobody has fenced it yet
    engines = {(await setup.generate(key=str(i))).engines[0] for i in range(8)}
    assert engines == {"engine-1"}


async def test_requests_go_round_a_router_that_lost_its_engines(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:  # covers: A3
    for engine in setup.engines:
        await setup.router.remove(engine.url)
    async with asyncio.timeout(60):
        while await setup.router.workers():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    with monkeypatch.context() as patch:
        patch.setattr(setup.client, "_retries", 0)
        with pytest.raises(TransientEngineError, match=r"model_not_found|no_available_workers"):
            await setup.generate()
    engines = {(await setup.generate(key=str(i))).engines[0] for i in range(24)}
    assert engines == {"engine-0", "engine-1"}


class Supervised:
    """A router that is supervised."""

    def __init__(self, log_dir: Path, **budget: float) -> None:
        self._http = Http()
        self._registry = EngineRegistry()
        self._router = Router(self._registry, self._http, log_dir=log_dir, **budget)

    async def __aenter__(self) -> Supervised:
        await self._router.start()
        self.supervision = asyncio.create_task(self._router.supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.supervision.cancel()
        await asyncio.gather(self.supervision, return_exceptions=True)
        await self._router.stop()
        await self._http.close()

    async def kill(self) -> None:
        os.kill(await self._router.pid(), signal.SIGKILL)
        await self._until(up=False)

    async def restarted(self) -> None:
        await self._until(up=True)
        assert not self.supervision.done()

    async def _until(self, *, up: bool) -> None:
        async with asyncio.timeout(90):
            while self._registry.router_up is not up:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_router_that_dies_too_often_ends_the_run(tmp_path: Path) -> None:  # covers: C10
    async with Supervised(tmp_path, max_restarts=1) as router:
        await router.kill()
        await router.restarted()
        await router.kill()
        with pytest.raises(EngineError, match=r"restarted 1 times in 3600 s, and now it died with status -9"):
            await router.supervision


async def test_a_router_whose_restart_fails_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # covers: C10
    async with Supervised(tmp_path, max_restarts=2) as router:
        start, failures = router._router.start, iter(["killed once more"])

        async def failing() -> None:
            if problem := next(failures, None):
                raise EngineStartError(problem)
            await start()

        monkeypatch.setattr(router._router, "start", failing)
        await router.kill()
        await router.restarted()
        await router.kill()
        with pytest.raises(EngineError, match="restarted 2 times"):
            await router.supervision


async def test_a_restart_of_the_router_that_is_long_ago_does_not_count(tmp_path: Path) -> None:  # covers: C10
    async with Supervised(tmp_path, max_restarts=1, restart_window=0.05) as router:
        for _ in range(3):  # a start takes longer than the window
            await router.kill()
            await router.restarted()


async def test_a_taken_port_and_a_bad_flag_are_clear_errors(setup: Setup, tmp_path: Path) -> None:
    port = int(setup.router.url.rpartition(":")[2])
    http = Http()
    with pytest.raises(ConfigurationError, match=f"port {port} is not free"):
        await Router(EngineRegistry(), http, log_dir=tmp_path / "b", port=port).start()
    with pytest.raises(EngineStartError, match=r"router ended with status 2(.|\n)*--no-such-flag"):
        await Router(EngineRegistry(), http, log_dir=tmp_path / "c", extra=("--no-such-flag",)).start()
    await http.close()
