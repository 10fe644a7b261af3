"""An engine whose tensor-parallel ranks are on two nodes, which here are two processes of one machine: it generates,
gets verified weights on all ranks, and ends and restarts as a whole.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from miles_async.arguments import EnginesArguments, WeightsArguments
from miles_async.engines.http import Http
from miles_async.engines.placement import RayServers
from miles_async.engines.registry import EngineState
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.stack import EngineStack
from miles_async.engines.supervisor import EngineGroup
from miles_async.runtime.network.addresses import LOCAL
from tests.integration.publishing import Trainer, published_spec, publishing
from tests.integration.served_models import save_served

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # megatron's about fused kernels, torch's about names that megatron uses
]

PROMPT = (5, 6, 7, 8)


@dataclass
class Running:
    """The engine under test."""

    stack: EngineStack
    model: Path

    async def parts(self) -> list[psutil.Process]:
        """The main process of each node, the first one's first."""
        handle: Any = self.stack.supervisor.handle("engine-0")
        return [psutil.Process(await part.perform(ServerProcess.pid)) for part in handle._parts]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, engine_imports: Path) -> AsyncIterator[Running]:
    ray = pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("two_nodes")
    model = save_served("qwen3-tied", folder / "model", seed=0)
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # SGLang asks for that on one NUMA node
    }
    ray.init(
        "local",  # not what another test has started
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    spec = published_spec(model, folder, engine_imports, tensor_parallel_size=2, nodes=2)
    stack = EngineStack(
        [EngineGroup(engines=1, ranks=2, streams=True, launch=RayServers(SGLANG, spec))],
        EnginesArguments(request_timeout=120.0, engine_start_timeout=200.0),
        WeightsArguments(publication_timeout=60.0),
        log_dir=folder / "logs",
        network=LOCAL,
        calls=SGLangServer,
    )
    await stack.start()
    supervision = asyncio.ensure_future(stack.supervise())
    try:
        yield Running(stack, model)
    finally:
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)
        await stack.stop()
        ray.shutdown()


@pytest.mark.long
async def test_all_ranks_get_weights_and_end_together(running: Running, tmp_path: Path) -> None:
    # covers: C8, C10
    record = running.stack.registry.engines["engine-0"]
    trainer, http = Trainer(running.model), Http()
    async with publishing(trainer, running.stack.fleet, tmp_path, engines_timeout=200.0) as published:
        publication = await published.next()
        assert publication.compared_tensors > 0
        assert record.state is EngineState.SERVING
        sampling = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        async with http.session.post(f"{record.url}/generate", json=body) as response:
            reply = await response.json()
        expected = trainer.logprobs([*PROMPT, *reply["output_ids"]])[len(PROMPT) - 1 :]
        said = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(said, expected, atol=1e-4)

        first, second = await running.parts()
        os.kill(second.pid, signal.SIGKILL)
        async with asyncio.timeout(200):
            await running.stack.registry.wait_until(lambda: record.incarnation == 1)
            await running.stack.registry.wait_until(lambda: record.state is EngineState.JOINING)
        assert not first.is_running()
        assert not {first, second} & {*await running.parts()}
        await published.next()
        assert record.state is EngineState.SERVING
    by_files = {"engines_timeout": 200.0, "weight_transport": "object_store"}
    async with publishing(trainer, running.stack.fleet, tmp_path, **by_files) as published:
        assert (await published.next()).compared_tensors > 0
        assert record.state is EngineState.SERVING
    await http.close()
    trainer.close()
