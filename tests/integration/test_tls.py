"""Every HTTP door of a run speaks TLS where the user gives certificates: router, engines, session server, agents."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import numpy as np
import pytest

from miles_async.engines.client import RouterClient
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.engines.router import Router
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.traffic import Traffic
from miles_async.runtime.addresses import Network
from miles_async.staleness.versions import parse_spans
from miles_async.types import GenerateRequest
from tests.fakes.certificates import Authority, needs_openssl
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.keys import KEYS
from tests.integration.real_run import real_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400), needs_openssl]

REQUEST = GenerateRequest(
    input_ids=np.array([5, 6], np.int32), sampling={"max_new_tokens": 4, "temperature": 1.0}, routing_key="1-0"
)


async def test_requests_go_through_the_router_to_engines_over_tls(tmp_path: Path) -> None:  # covers: C13
    tls = Authority.make(tmp_path / "authority").issue("127.0.0.1")
    registry, http = EngineRegistry(), Http(KEYS.engines, tls)
    router = Router(registry, http, log_dir=tmp_path, keys=KEYS.engines, network=Network(tls=tls))
    client = RouterClient(
        SGLangServer(http), http, registry, Traffic(), router_url=lambda: router.url, parse_versions=parse_spans,
        request_timeout=30.0, retries=0, gate_timeout=30.0,
    )  # fmt: skip
    try:
        async with FakeEngine(tls=tls, weight_version="0", name_worker=False) as engine:
            await router.start()
            assert {router.url[:8], engine.url[:8]} == {"https://"}
            await router.add(engine.url)
            registry.engines["engine-0"] = EngineRecord(
                engine_id="engine-0", state=EngineState.SERVING, url=engine.url, verified=True, version=0
            )
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


def test_a_run_trains_with_agents_over_tls_and_its_doors_speak_nothing_else(tmp_path: Path) -> None:  # covers: C13
    tls = Authority.make(tmp_path / "authority").issue("127.0.0.1")
    agent = f"python {Path(__file__).with_name('one_turn_agent.py')}"
    flags = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--num-rollout", "2")
    agents = (
        *("--agent-command", agent, "--session-server-workers", "2"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),  # each sample is a process of its own
        *("--eval-prompt-data", "none", "--eval-interval", "none"),
    )
    files = ("--tls-certificate", tls.certificate, "--tls-key", tls.key, "--tls-ca", str(tls.ca))
    with real_run(tmp_path / "run", *flags, *agents, *files) as run:
        assert run.wait(300) == 0, run.output
    assert len(run.steps) == 2
    assert run.summary["steps"] == 2
