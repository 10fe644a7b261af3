"""The router and its clients speak TLS where the user gives certificates (``test_doors.py``: the doors of a run)."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import numpy as np
import pytest

from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.router import Router
from miles_async.runtime.network.addresses import Network
from miles_async.types import GenerateRequest
from tests.fakes.certificates import Authority, needs_openssl
from tests.fakes.clients import client_of, serving
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.keys import KEYS

pytestmark = [pytest.mark.integration, needs_openssl]

REQUEST = GenerateRequest(
    input_ids=np.array([5, 6], np.int32), sampling={"max_new_tokens": 4, "temperature": 1.0}, routing_key="1-0"
)


async def test_requests_go_through_the_router_to_engines_over_tls(tmp_path: Path) -> None:  # covers: C13
    tls = Authority.make(tmp_path / "authority").issue("127.0.0.1")
    registry, http = EngineRegistry(), Http(KEYS.engines, tls)
    router = Router(registry, http, log_dir=tmp_path, keys=KEYS.engines, network=Network(tls=tls))
    client = client_of(http, registry, lambda: router.url)
    try:
        async with FakeEngine(tls=tls, weight_version="0", name_worker=False) as engine:
            await router.start()
            assert {router.url[:8], engine.url[:8]} == {"https://"}
            await router.add(engine.url)
            registry.engines["engine-0"] = serving(engine.url, version=0)
            registry.notify()
            assert len((await client.generate(REQUEST)).output_ids) == 4
            async with aiohttp.ClientSession() as stranger:
                with pytest.raises(aiohttp.ClientConnectorCertificateError):  # who does not trust the authority
                    await stranger.get(f"{router.url}/health")
                with pytest.raises(aiohttp.ClientError):
                    await stranger.get(router.url.replace("https", "http") + "/health")
    finally:
        await router.stop()
        await http.close()
