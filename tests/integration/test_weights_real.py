"""Every transport brings new weights to a real SGLang server, in every pause mode; whatever is corrupted on the way is
found, and nothing is left behind. One server with a mixture of experts, no Ray and no router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from arguments import WeightsArguments
from miles_async.engines.external import ExternalServers
from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.placement import LocalServers
from miles_async.engines.registry import EngineRegistry, EngineState
from miles_async.engines.server import ServerSpec
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.errors import PublicationError
from miles_async.protocols import EngineErrors
from miles_async.trainer.group import united
from miles_async.types import FleetMembers, Publication, StagedWeights
from miles_async.weights.publisher import WeightPublisher
from miles_async.weights.senders.distributed import DistributedSender
from miles_async.weights.senders.object_store import ObjectStoreSender
from miles_async.weights.staging import Staging, StagingOptions
from miles_async.weights.transports.choice import choose_transport
from miles_async.weights.update import FleetUpdater
from tests.fakes.fake_engine import FakeRouter
from tests.fakes.fake_sides import FakeTrainer
from tests.integration.served_models import reference_logprobs, save_served

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

ENGINE = "engine-0"
CANARY = tuple(range(3, 35))
PROMPT = (5, 6, 7, 8)
LONG = 80
TRANSPORTS: dict[str, dict[str, Any]] = {
    "distributed": {},
    "distributed, two senders": {"senders": 2},
    "disk": {"weight_transport": "disk"},
    "object_store": {"weight_transport": "object_store"},
    "disk, xor": {"weight_transport": "disk", "weight_delta": "xor"},
    "object_store, overwrite": {"weight_transport": "object_store", "weight_delta": "overwrite", "senders": 2},
}
Corrupt = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]


class RecordingFleet(Fleet):
    """Notes who is to be fenced, and leaves it alone: a restart would take half a minute."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fenced: list[str] = []
        self.before_pause: Callable[[], Awaitable[None]] | None = None  # once

    async def pause(self, engines: Sequence[str], mode: str) -> EngineErrors:
        before, self.before_pause = self.before_pause, None
        if before is not None:
            await before()
        return await super().pause(engines, mode)

    async def fence(self, engines: Sequence[str], reason: str) -> None:
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
    models: tuple[Path, Path]
    directory: Path
    processes: list[psutil.Process]
    version: int = -1

    async def is_generating(self) -> bool:
        url = self.registry.engines[ENGINE].url
        async with self.http.session.get(f"{url}/v1/loads") as response:
            return any(load["num_running_reqs"] for load in (await response.json())["loads"])

    async def generate(self, tokens: int) -> dict[str, Any]:
        url = self.registry.engines[ENGINE].url
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        body["extra_key"] = f"v{self.registry.version}"  # as the client does
        async with self.http.session.post(f"{url}/generate", json=body) as response:
            assert response.status == 200
            return await response.json()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    folder = tmp_path_factory.mktemp("weights")
    models = (save_served("qwen3-moe", folder / "m0", seed=0), save_served("qwen3-moe", folder / "m1", seed=1))
    spec = ServerSpec(
        model_path=str(models[0]),
        device="cpu",
        dtype="float32",
        start_timeout=200,
        log_dir=str(folder / "logs"),
        held_weights=True,
    )
    registry, http = EngineRegistry(), Http()
    router: Any = FakeRouter(registry)
    supervisor = EngineSupervisor(registry, router, http, [EngineGroup(engines=1, launch=LocalServers(spec))])
    fleet = RecordingFleet(registry, supervisor, http, Traffic())
    await router.start()
    await supervisor.start()
    handle: Any = supervisor.handle(ENGINE)
    main = psutil.Process(await handle.pid())
    processes = [main, *main.children(recursive=True)]
    yield Server(fleet, registry, http, models, folder, processes)
    host_directory = handle._directory.path
    assert host_directory.is_dir()
    await supervisor.stop()
    assert not host_directory.exists()
    await http.close()
    assert psutil.wait_procs(processes, 10)[1] == []


class SavedWeights(FakeTrainer):
    """A trainer whose versions are saved models in turn, really staged and sent; spoiled by ``corrupt`` on the way."""

    def __init__(self, server: Server, senders: Sequence[Staging], corrupt: Corrupt | None) -> None:
        super().__init__([])
        self._server = server
        self._senders = senders
        self._corrupt = corrupt

    async def stage_weights(self, version: int) -> StagedWeights:
        model = self._server.models[version % 2]
        weights = load_file(model / "model.safetensors")
        shares = [await asyncio.to_thread(sender.stage, version, weights.items()) for sender in self._senders]
        if self._corrupt is not None:
            for staged in shares:
                self._corrupt_files(staged, load_file(self._server.models[(version - 1) % 2] / "model.safetensors"))
        scores = tuple(reference_logprobs(model, CANARY).tolist())
        return msgspec.structs.replace(united(shares), canary_tokens=CANARY, canary_logprobs=scores)

    def _corrupt_files(self, staged: StagedWeights, before: dict[str, torch.Tensor]) -> None:
        """What every transport sends from then on; the manifest says what should have been sent."""
        assert self._corrupt is not None
        for path in Path(staged.directory).glob("*.safetensors"):
            tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
            self._corrupt(tensors, before)
            save_file(tensors, path)

    async def call_sender(self, method: str, arguments: Sequence[Any] = (), *, sender: int = 0) -> Any:
        return await asyncio.to_thread(getattr(self._senders[sender], method), *arguments)


@asynccontextmanager
async def publisher(
    server: Server, corrupt: Corrupt | None = None, senders: int = 1, **flags: Any
) -> AsyncIterator[WeightPublisher]:
    """With the transport that ``flags`` choose; everything that it opened is closed again."""
    arguments = WeightsArguments(**({"verify_weights": "full"} | flags))
    delta: Any = None if arguments.weight_delta == "off" else arguments.weight_delta
    made: list[Staging] = []
    for sender in range(senders):
        options = StagingOptions(
            parent=server.directory / "staged", bucket_bytes=50_000, sender=sender, senders=senders, delta=delta
        )
        made.append(
            DistributedSender(
                options, address="127.0.0.1", backend="gloo", device=torch.device("cpu"), timeout_seconds=30
            )
            if arguments.weight_transport == "distributed"
            else ObjectStoreSender(options, put=np.array)
        )
    trainer = SavedWeights(server, made, corrupt)
    transport = choose_transport(arguments, trainer, server.fleet, "cpu")
    updater = FleetUpdater(server.fleet, transport, arguments, tolerance=1e-3, engines_timeout=1.0)
    publishing = WeightPublisher(trainer, updater, arguments)
    try:
        yield publishing
    finally:
        await publishing.close()
        for opened in made:
            opened.close()
        assert list((server.directory / "staged").iterdir()) == []


async def publish_next(server: Server, publishing: WeightPublisher) -> Publication:
    server.version += 1
    return await publishing.publish(server.version)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_new_weights_reach_the_engine(server: Server, transport: str, mode: str) -> None:
    # covers: C8, M11, P4
    async with publisher(server, pause_generation_mode=mode, **TRANSPORTS[transport]) as publishing:
        await publish_next(server, publishing)
        in_flight: list[asyncio.Task[dict[str, Any]]] = []

        async def start_request() -> None:
            in_flight.append(asyncio.ensure_future(server.generate(LONG)))
            while not await server.is_generating():  # noqa: ASYNC110  (servers tell nobody)
                await asyncio.sleep(0.01)

        server.fleet.before_pause = start_request
        publication = await publish_next(server, publishing)
    assert publication.engines == (ENGINE,)
    assert server.fleet.fenced == []
    assert server.registry.version == server.version
    assert publication.canary_difference < 1e-4
    versions = {span["version"] for span in (await in_flight[0])["meta_info"]["weight_versions"]}
    assert versions <= {str(server.version - 1), str(server.version)}
    assert (str(server.version) in versions) == (mode != "abort")
    reply = await server.generate(16)  # the prompt of the request that was in flight
    assert reply["meta_info"]["weight_versions"] == [{"version": str(server.version), "start": 0, "end": 16}]
    model = server.models[server.version % 2]
    expected = reference_logprobs(model, (*PROMPT, *reply["output_ids"]))[len(PROMPT) - 1 :]
    np.testing.assert_allclose([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]], expected, atol=1e-4)


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
    async with publisher(server, corrupt, **TRANSPORTS[transport]) as publishing:
        server.version += 1
        with pytest.raises(PublicationError, match=r"engine-0 was lost: .* has other elements than were sent"):
            await publishing.publish(server.version)
    assert len(server.fleet.fenced) == 1
    assert server.registry.version == committed
    assert not server.registry.may_dispatch()
    server.fleet.fenced.clear()
    async with publisher(server) as publishing:  # what is right is taken by the same engine
        assert (await publish_next(server, publishing)).engines == (ENGINE,)
    assert server.registry.may_dispatch()


async def test_an_external_engine_is_brought_to_the_weights_and_left_running(server: Server) -> None:
    # covers: C8
    url = server.registry.engines[ENGINE].url
    assert url is not None
    registry, attached = (
        EngineRegistry(),
        EngineGroup(engines=1, launch=ExternalServers([url.removeprefix("http://")], 30.0)),
    )
    router: Any = FakeRouter(registry)
    supervisor = EngineSupervisor(registry, router, server.http, [attached])
    await router.start()
    await supervisor.start()
    external = replace(server, fleet=RecordingFleet(registry, supervisor, server.http, Traffic()), registry=registry)
    async with publisher(external, verify_weights="canary") as publishing:
        assert (await publish_next(external, publishing)).engines == (ENGINE,)
    assert external.fleet.fenced == []
    await supervisor.stop()
    server.version = external.version
    reply = await server.generate(4)
    assert reply["meta_info"]["weight_versions"] == [{"version": str(server.version), "start": 0, "end": 4}]


async def test_nothing_is_left_by_publications(server: Server) -> None:
    here = psutil.Process()

    def held() -> tuple[Any, ...]:
        sockets = len([c for c in here.net_connections() if c.status == psutil.CONN_LISTEN])
        return sockets, [process.num_fds() for process in server.processes]

    for transport in TRANSPORTS.values():
        counts = []
        for _ in range(2):
            async with publisher(server, **transport) as publishing:
                await publish_next(server, publishing)
                await publish_next(server, publishing)
            counts.append(held())
        assert counts[0] == counts[1], transport
    assert server.registry.engines[ENGINE].state is EngineState.SERVING
