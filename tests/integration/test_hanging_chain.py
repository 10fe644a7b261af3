"""A chain of 16 engines, one of which hangs: the others have the version within two deadlines, and it is fenced.

The real publisher, fleet, HTTP calls, process groups and streams. Instead of SGLang, 16 processes load what they
receive, each as if it were on a node of its own, so that every bucket passes through all of them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiohttp import web

from miles_async.arguments.weights import WeightsArguments
from miles_async.engines.external import ExternalServers
from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry, EngineState
from miles_async.engines.sglang import WEIGHT_GROUP_SECONDS_VARIABLE, patches, relay, weight_stream
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.types import JsonObject, StagedWeights
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.distributed.rank import DistributedSender
from miles_async.weights.transports.spec import RankSide
from tests.fakes.fake_fleet import FakeRouter
from tests.fakes.fake_sides import FakeTrainer, InProcess, publish
from tests.fakes.publishers import publisher_of
from tests.integration.weight_receiver import init_custom_process_group, stream_manager

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(500)]

ENGINES, HANGING = 16, 7
MODULES, ELEMENTS = 12, 40_000  # buckets, and float32 elements of each: more than sockets hold
MIDDLE = 3  # buckets
ARGUMENTS = WeightsArguments(verify_weights="off", publication_timeout=90.0)
STEP = ARGUMENTS.step_timeout

FORK = multiprocessing.get_context("forkserver")  # torch is imported once
FORK.set_forkserver_preload(["aiohttp.web", "tests.integration.test_hanging_chain"])


def weights(version: int) -> dict[str, torch.Tensor]:
    return {f"{module}.a.weight": torch.full((ELEMENTS,), float(module + version)) for module in range(MODULES)}


def sums_of(version: int) -> dict[str, float]:
    return {name: float(tensor.sum()) for name, tensor in weights(version).items()}


# ---------------------------------------------------------------------------------------------- an engine's process
@dataclass
class Engine:
    """SGLang's HTTP calls of a publication."""

    hangs_in: int | None  # the version in which it stops itself, in the middle of the buckets
    version: str = "default"
    held: dict[str, float] = field(default_factory=dict)  # sum of each tensor
    groups: dict[str, object] = field(default_factory=dict)

    async def answer(self, request: web.Request) -> web.Response:
        problem = None
        match request.path:
            case "/model_info":
                return web.json_response({"weight_version": self.version})
            case "/held":
                return web.json_response({"version": self.version, "sums": self.held})
            case "/init_weights_update_group":
                await asyncio.to_thread(self._join, await request.json())
            case "/destroy_weights_update_group":
                if (group := self.groups.pop((await request.json())["group_name"], None)) is not None:
                    dist.destroy_process_group(group)
            case "/update_weights_from_distributed":
                problem = await asyncio.to_thread(self._receive, await request.json())
        return web.json_response({"success": problem is None, "message": problem or ""})

    def _join(self, body: JsonObject) -> None:
        self.groups[body["group_name"]] = patches.with_deadline(
            init_custom_process_group,
            body["master_address"],
            int(body["master_port"]),
            body["group_name"],
            body["rank_offset"],
            body["world_size"],
        )

    def _receive(self, body: JsonObject) -> str | None:
        received: dict[str, float] = {}

        def load(tensors: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
            if len(received) == MIDDLE and body["weight_version"] == str(self.hangs_in):
                os.kill(os.getpid(), signal.SIGSTOP)
            received.update({name: float(tensor.sum()) for name, tensor in tensors})
            return True, ""

        problem = weight_stream._loaded(stream_manager(self.groups, load), body["group_name"].split())
        if problem is None:
            self.version, self.held = body["weight_version"], received
        return problem


def serve(connection: Connection, index: int, hangs_in: int | None) -> None:
    os.environ[WEIGHT_GROUP_SECONDS_VARIABLE] = str(ARGUMENTS.group_timeout)
    relay._node = lambda: index  # type: ignore[assignment]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    async def main() -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", Engine(hangs_in).answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        connection.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------- the driver
class Trainer(FakeTrainer):
    """Stages real tensors; one sender."""

    def __init__(self, sender: DistributedSender) -> None:
        super().__init__([])
        self._half = sender

    async def copy_weights(self, version: int) -> None:
        await asyncio.to_thread(self._half.copy, version, weights(version).items())

    async def stage_weights(self, version: int) -> StagedWeights:
        return await asyncio.to_thread(self._half.stage, version)

    def sender(self, index: int, *, repair: bool = False) -> InProcess:
        return InThread(self._half)


class InThread(InProcess):
    """SenderHandle of a half whose methods block."""

    async def call(self, method: Callable[..., object], *arguments: object) -> Any:
        return await asyncio.to_thread(getattr(self._half, method.__name__), *arguments)


@dataclass(frozen=True)
class Servers:
    """The processes of all engines."""

    processes: list[Any]
    addresses: list[str]


@pytest.fixture
def servers_of() -> Iterator[Callable[[int | None], Servers]]:
    processes: list[Any] = []

    def start(hangs_in: int | None) -> Servers:
        pipes = []
        for index in range(ENGINES):
            ours, theirs = FORK.Pipe()
            own = hangs_in if index == HANGING else None
            processes.append(FORK.Process(target=serve, args=(theirs, index, own), daemon=True))
            processes[-1].start()
            pipes.append(ours)
        return Servers(processes, [f"127.0.0.1:{pipe.recv()}" for pipe in pipes])

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("moment", ["before it is asked", "in the middle of the buckets"])
async def test_an_engine_of_16_that_hangs_costs_two_deadlines_and_nobody_else_the_version(
    servers_of: Callable[[int | None], Servers], tmp_path: Path, moment: str
) -> None:
    # covers: C8, C10
    in_the_middle = moment == "in the middle of the buckets"
    servers = servers_of(1 if in_the_middle else None)
    registry, http = EngineRegistry(), Http()
    server, router = SGLangServer(http), FakeRouter(registry)
    launch = ExternalServers(servers.addresses, 60.0, SGLangServer, None)
    supervisor = EngineSupervisor(registry, router, server, [EngineGroup(engines=ENGINES, streams=True, launch=launch)])
    fleet = Fleet(registry, supervisor, server, Traffic(), step_timeout=STEP)
    staging = StagingOptions(parent=tmp_path, bucket_bytes=4 * ELEMENTS, sender=0, senders=1)
    sender = DistributedSender(
        RankSide(staging=staging, address="127.0.0.1", device="cpu", timeout_seconds=ARGUMENTS.group_timeout)
    )
    trainer = Trainer(sender)
    publisher = publisher_of(trainer, fleet, ARGUMENTS)
    try:
        await router.start()
        await supervisor.start()
        first = await publish(publisher, 0)
        assert len(first.engines) == ENGINES
        if not in_the_middle:
            os.kill(servers.processes[HANGING].pid, signal.SIGSTOP)
        second = await publish(publisher, 1)
        hanging = f"engine-{HANGING}"
        assert second.fenced == (hanging,)
        assert set(second.engines) == {f"engine-{index}" for index in range(ENGINES)} - {hanging}
        assert second.pause_seconds <= 2 * STEP
        assert (second.pause_seconds > 0.5 * STEP) == in_the_middle, "else it is noticed before the others pause"
        for index, address in enumerate(servers.addresses):
            if index != HANGING:
                async with http.session.get(f"http://{address}/held") as response:
                    assert await response.json() == {"version": "1", "sums": sums_of(1)}
        assert registry.engines[hanging].state is not EngineState.SERVING
    finally:
        await supervisor.stop()
        await http.close()
        sender.close()
