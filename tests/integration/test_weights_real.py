"""Every transport brings what Megatron trained to a real SGLang server, in every pause mode; whatever is corrupted on
the way is found, and nothing is left behind. One server with a mixture of experts, no Ray and no router.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from miles_async.engines.external import ExternalServers
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry, EngineState
from miles_async.engines.server_process import ServerProcess
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.kind import SGLANG
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.errors import PublicationError
from miles_async.seams import InferenceServer
from miles_async.types import CanaryScore, FleetMembers, Incarnation, JsonObject
from tests.fakes.fake_fleet import FakeRouter
from tests.integration.publishing import (
    TRANSPORTS,
    Corrupt,
    Held,
    HookedFleet,
    Publishing,
    Trainer,
    check_interrupted,
    listening_sockets,
    published_spec,
    publishing,
    random_sequences,
    reply_logprobs,
    settled,
    until_no_more,
)
from tests.integration.served_models import save_served
from tests.integration.streamed_request import StreamedRequest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # megatron's about fused kernels, torch's about names that megatron uses
]

ENGINE = "engine-0"
PROMPT = (5, 6, 7, 8)
LONG = 500  # tokens: many more than come before a pause


class RecordingFleet(HookedFleet):
    """Notes who is to be fenced, and leaves it alone: a restart would take half a minute."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.fenced: list[str] = []

    async def fence(self, engines: Sequence[Incarnation], reason: str) -> None:
        self.fenced.append(reason)

    async def members(self) -> FleetMembers:
        members = await super().members()
        return msgspec.structs.replace(members, serving=(), joining=()) if self.fenced else members


@dataclass
class Server:
    """The engine under test."""

    fleet: RecordingFleet
    registry: EngineRegistry
    http: Http
    trainer: Trainer
    staged: Path
    processes: list[psutil.Process]

    def publishing(self, **options: object) -> AbstractAsyncContextManager[Publishing]:
        return publishing(self.trainer, self.fleet, self.staged, **options)

    def stream(self, tokens: int) -> StreamedRequest:
        url = self.registry.engines[ENGINE].url
        assert url is not None
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        body["extra_key"] = f"v{self.registry.version}"  # as the client does
        return StreamedRequest(self.http, url, body)

    async def generate(self, tokens: int) -> JsonObject:
        return await self.stream(tokens).reply

    def trained(self, reply: JsonObject) -> list[float]:
        """What the trainer gives for the output."""
        return self.trainer.logprobs([*PROMPT, *reply["output_ids"]])[len(PROMPT) - 1 :]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, engine_imports: Path) -> AsyncIterator[Server]:
    folder = tmp_path_factory.mktemp("weights")
    model = save_served("qwen3-moe", folder / "model", seed=0)
    spec = published_spec(model, folder, engine_imports)
    registry, http = EngineRegistry(), Http()
    router = FakeRouter(registry)
    supervisor = EngineSupervisor(
        registry,
        router,
        SGLangServer(http),
        [EngineGroup(engines=1, streams=True, launch=partial(ServerProcess, SGLANG, spec))],
    )
    fleet = RecordingFleet(registry, supervisor, SGLangServer(http), Traffic())
    await router.start()
    await supervisor.start()
    handle: Any = supervisor.handle(ENGINE)
    main = psutil.Process(await handle.pid())
    processes = [main, *main.children(recursive=True)]
    trainer = Trainer(model)
    yield Server(fleet, registry, http, trainer, folder / "staged", processes)
    trainer.close()
    host_directory = handle._directory.path
    assert host_directory.is_dir()
    await supervisor.stop()
    assert not host_directory.exists()
    await http.close()
    assert psutil.wait_procs(processes, 10)[1] == []


@pytest.mark.parametrize(
    ("mode", "transport"),
    [
        pytest.param(mode, transport, marks=() if "retract" in mode or "distributed" in transport else pytest.mark.long)
        for mode in ("retract", "in_place", "abort")
        for transport in TRANSPORTS
    ],
)
async def test_what_is_trained_is_what_generates(server: Server, transport: str, mode: str) -> None:
    # covers: C8, M11, P4, A2
    async with server.publishing(pause_generation_mode=mode, **TRANSPORTS[transport]) as published:
        await published.next()
        before = server.trainer.logprobs(random_sequences()[-1])
        in_flight: list[StreamedRequest] = []

        async def start_request() -> None:
            in_flight.append(server.stream(LONG))
            await in_flight[0].goes_on()

        server.fleet.before_pause = start_request
        publication = await published.next()
    version = server.trainer.version
    assert publication.engines == (ENGINE,)
    assert server.fleet.fenced == []
    assert server.registry.version == version
    assert publication.canary_difference < 1e-4
    for sequence in random_sequences():
        [score] = (
            await server.fleet.call([server.registry.engines[ENGINE].current], InferenceServer.score, sequence)
        ).values()
        assert isinstance(score, CanaryScore)
        np.testing.assert_allclose(score.logprobs, server.trainer.logprobs(sequence), atol=1e-4)
    assert np.abs(np.subtract(score.logprobs, before)).max() > 1e-2  # else older weights would pass as well
    await check_interrupted(server.trainer, PROMPT, in_flight[0], mode)
    reply = await server.generate(16)  # the prompt of the request that was in flight
    assert reply["meta_info"]["weight_versions"] == [{"version": str(version), "start": 0, "end": 16}]
    np.testing.assert_allclose(reply_logprobs(reply), server.trained(reply), atol=1e-4)


def one_element(tensors: dict[str, torch.Tensor], _: dict[str, torch.Tensor]) -> None:
    if (name := "model.layers.1.mlp.gate.weight") in tensors:
        tensors[name][2, 3] += 1e-6


def a_transposed_matrix(tensors: dict[str, torch.Tensor], _: dict[str, torch.Tensor]) -> None:
    if (name := "model.layers.0.self_attn.q_proj.weight") in tensors:
        tensors[name] = tensors[name].t().contiguous()


def swapped_experts(tensors: dict[str, torch.Tensor], _: dict[str, torch.Tensor]) -> None:
    experts = [name for name in tensors if name.startswith("model.layers.0.") and name.endswith("up_proj.weight")]
    if len(experts) > 1:
        first, second = experts[:2]
        tensors[first], tensors[second] = tensors[second], tensors[first]


def a_stale_bucket(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    if "model.norm.weight" in tensors:
        tensors |= {name: before[name] for name in tensors}


@pytest.mark.parametrize("transport", ["distributed", "disk"])
@pytest.mark.parametrize("corrupt", [one_element, a_transposed_matrix, swapped_experts, a_stale_bucket])
async def test_what_is_corrupted_on_the_way_is_never_committed(
    server: Server, corrupt: Corrupt, transport: str
) -> None:
    # covers: C8
    committed = server.registry.version
    async with server.publishing(corrupt=corrupt, **TRANSPORTS[transport]) as published:
        with pytest.raises(PublicationError, match=r"engine-0 was lost: .* has other elements than were sent"):
            await published.next()
    assert len(server.fleet.fenced) == 1
    assert server.registry.version == committed
    assert not server.registry.may_dispatch()
    server.fleet.fenced.clear()
    async with server.publishing() as published:  # what is right is taken by the same engine
        assert (await published.next()).engines == (ENGINE,)
    assert server.registry.may_dispatch()


async def test_an_external_engine_is_brought_to_the_weights_and_left_running(server: Server) -> None:
    """In place, with a cache that somebody else has filled under the keys of versions to come."""
    # covers: C8, A2, M11
    url = server.registry.engines[ENGINE].url
    assert url is not None
    before = server.registry.version
    server.registry.version = server.trainer.version + 1
    await server.generate(4)
    server.registry.version = before

    registry, launch = EngineRegistry(), ExternalServers([url.removeprefix("http://")], 30.0, SGLangServer)
    router = FakeRouter(registry)
    supervisor = EngineSupervisor(registry, router, SGLangServer(server.http), [EngineGroup(engines=1, launch=launch)])
    await router.start()
    await supervisor.start()
    external = replace(
        server, fleet=RecordingFleet(registry, supervisor, SGLangServer(server.http), Traffic()), registry=registry
    )
    async with external.publishing(verify_weights="canary", pause_generation_mode="in_place") as published:
        assert (await published.next()).engines == (ENGINE,)
    assert external.fleet.fenced == []
    reply = await external.generate(4)
    assert reply_logprobs(reply) == pytest.approx(external.trained(reply), abs=1e-4)
    await supervisor.stop()
    reply = await server.generate(4)
    version = str(server.trainer.version)
    assert reply["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 4}]


async def test_nothing_is_left_by_publications(server: Server) -> None:
    def held() -> Held:
        return listening_sockets(), [process.num_fds() for process in server.processes]

    async def publish(transport: dict[str, object]) -> None:
        async with server.publishing(**transport) as published:
            await published.next()
            await published.next()

    for transport in TRANSPORTS.values():
        await publish(transport)
        before = await settled(held)
        await publish(transport)
        await until_no_more(held, before)
    assert server.registry.engines[ENGINE].state is EngineState.SERVING
