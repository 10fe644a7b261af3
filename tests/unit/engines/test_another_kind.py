"""The seam of inference servers: one with a protocol of its own runs behind the real fleet, supervisor and client."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import pytest

from miles_async.engines.client import ROUTED_WORKER, RouterClient
from miles_async.engines.fleet import Fleet
from miles_async.engines.kind import ServerSpec
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.router import Router
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineError
from miles_async.seams import InferenceServer, TokenVersions, per_engine
from miles_async.simulation.engines import ROUTER_URL, SimulatedRouter
from miles_async.simulation.network import Network, Response, SimulatedHttp
from miles_async.types import (
    CanaryScore,
    EngineLoad,
    GenerateRequest,
    Generation,
    HeldWeights,
    Incarnation,
    TensorMeta,
    TensorShare,
)

Operation = TypeVar("Operation", bound=Callable[..., Any])


class EchoProcess:
    """A ``ServerHandle``: a server in this process that says what it was told, from its end to its beginning."""

    def __init__(self, network: Network, spec: ServerSpec, engine_index: int, incarnation: int) -> None:
        self.url = f"sim://{spec.group}-{engine_index}.{incarnation}"
        self.version = "none"
        self.calls: list[str] = []
        self._network = network
        self._ended = asyncio.Event()

    async def start(self) -> str:
        self._network.hosts[self.url] = self
        return self.url

    async def answer(self, path: str, body: bytes, headers: object) -> Response:
        assert path == "/echo"
        said = {"said": msgspec.json.decode(body)["heard"][::-1], "version": self.version}
        return Response(msgspec.json.encode(said), headers={ROUTED_WORKER: self.url})

    async def wait_exit(self) -> str:
        await self._ended.wait()
        return "it ended"

    async def on_host(self, function: Callable[..., object], room: int, *arguments: object) -> object:
        return function(Path("/nowhere"), *arguments)

    async def stop(self) -> None:
        self._network.hosts.pop(self.url, None)
        self._ended.set()


def noting(declared: Operation, call: str) -> Operation:
    """An operation, declared by ``InferenceServer``, that the server notes as ``call``."""

    @wraps(declared)
    async def operation(server: EchoServer, url: str, timeout: float) -> None:
        server._at(url).calls.append(call)

    return cast(Operation, operation)


class EchoServer:
    """Implements ``InferenceServer``."""

    generate_path = "/echo"

    abort_all = noting(InferenceServer.abort_all, "abort all")
    make_progress = noting(InferenceServer.make_progress, "progress")
    resume = noting(InferenceServer.resume, "resume")
    flush_cache = noting(InferenceServer.flush_cache, "flush")
    release_memory = noting(InferenceServer.release_memory, "release")
    retake_memory = noting(InferenceServer.retake_memory, "retake")
    begin_update = noting(InferenceServer.begin_update, "begin")
    end_update = noting(InferenceServer.end_update, "end")

    def __init__(self, network: Network) -> None:
        self._network = network

    def encode(self, request: GenerateRequest, *, request_id: str, version: int, experts: bool) -> bytes:
        return msgspec.json.encode({"heard": list(request.input_ids)})

    def decode(self, body: bytes, content_type: str, url: str, versions: TokenVersions) -> Generation:
        answer = msgspec.json.decode(body)
        output_ids = np.array(answer["said"], np.int32)
        return Generation(
            output_ids=output_ids,
            logprobs=np.zeros(len(output_ids), np.float32),
            weight_versions=versions(None, answer["version"], len(output_ids)),
            finish_reason="stop",
        )

    async def weight_version(self, url: str, timeout: float) -> str:
        return self._at(url).version

    async def probe(self, url: str, timeout: float) -> int:
        self._at(url)
        return 1

    async def load(self, url: str, timeout: float) -> EngineLoad:
        return EngineLoad(running=0, waiting=0, kv_use=0.0)

    async def score(self, url: str, tokens: Sequence[int], timeout: float, *, first: int = 1) -> CanaryScore:
        return CanaryScore(self._at(url).version, np.zeros(len(tokens) - first, np.float32))

    async def report_weights(self, url: str, share: TensorShare, timeout: float) -> str:
        return "nothing"

    async def held_weights(self, url: str, report: str, timeout: float) -> HeldWeights:
        return HeldWeights(parts={})

    async def join_group(
        self, url: str, first_rank: int, group_name: str, address: str, port: int, world_size: int, backend: str,
        timeout: float,
    ) -> None:  # fmt: skip
        self._at(url).calls.append(f"join {group_name} as {first_rank} of {world_size}")

    async def receive_bucket(
        self, url: str, group_name: str, tensors: Sequence[TensorMeta], version: int, timeout: float
    ) -> None:
        self._at(url).version = str(version)

    async def receive_stream(self, url: str, group_names: Sequence[str], version: int, timeout: float) -> None:
        raise AssertionError("its kind doesn't say that it can")

    async def receive_handles(self, url: str, handles: str, ranks: int, version: int, timeout: float) -> None:
        self._at(url).version = str(version)

    async def load_files(self, url: str, directory: str, version: int, timeout: float) -> None:
        self._at(url).version = str(version)

    async def abort(self, url: str, request_id: str, timeout: float) -> None:
        """It is faster than that."""

    async def leave_group(self, url: str, group_name: str, timeout: float) -> None:
        self._at(url).calls.append(f"leave {group_name}")

    async def pause(self, url: str, mode: str, timeout: float) -> None:
        self._at(url).calls.append(f"pause {mode}")

    def _at(self, url: str) -> EchoProcess:
        if url not in self._network.hosts:
            raise EngineError(f"nobody listens at {url}")
        return cast(EchoProcess, self._network.hosts[url])


@pytest.mark.parametrize("implementation", [SGLangServer, EchoServer])
def test_an_implementation_has_the_methods_of_the_protocol(implementation: type) -> None:
    methods = [name for name, member in vars(InferenceServer).items() if inspect.isfunction(member) and name[0] != "_"]
    assert len(methods) > 15
    for name in methods:
        expected, found = getattr(InferenceServer, name), getattr(implementation, name)
        assert list(inspect.signature(found).parameters) == list(inspect.signature(expected).parameters), name
        assert inspect.iscoroutinefunction(found) is inspect.iscoroutinefunction(expected), name


async def test_weights_reach_another_kind_of_server_and_it_generates_with_them() -> None:  # covers: C8
    network, registry, traffic = Network(), EngineRegistry(), Traffic()
    http, server = SimulatedHttp(network), EchoServer(network)
    router = cast(Router, SimulatedRouter(registry, network, "consistent_hashing", random.Random(0)))
    spec = ServerSpec(group="echo", model_path="none", device="cpu", dtype="float32")
    group = EngineGroup(name="echo", engines=2, launch=partial(EchoProcess, network, spec))
    supervisor = EngineSupervisor(registry, router, server, [group])
    fleet = Fleet(registry, supervisor, server, traffic)
    client = RouterClient(
        server, http, registry, traffic, router_url=lambda: ROUTER_URL,
        request_timeout=5.0, retries=0, gate_timeout=5.0,
    )  # fmt: skip
    await router.start()
    await supervisor.start()

    engines = (await fleet.members()).joining
    assert engines == (Incarnation("echo-0", 0), Incarnation("echo-1", 0))
    first_ranks = {engines[0]: 1, engines[1]: 2}
    bucket = (TensorMeta("w", "float32", (2,)),)
    for errors in (
        await fleet.call(
            engines, InferenceServer.join_group, per_engine(first_ranks), "weights", "127.0.0.1", 1, 3, "gloo"
        ),
        await fleet.call(engines, InferenceServer.pause, "retract"),
        await fleet.call(engines, InferenceServer.flush_cache),
        await fleet.call(engines, InferenceServer.begin_update),
        await fleet.call(engines, InferenceServer.receive_bucket, "weights", bucket, 7),
        await fleet.call(engines, InferenceServer.end_update),
        await fleet.call(engines, InferenceServer.resume),
        await fleet.call(engines, InferenceServer.leave_group, "weights", brief=True),
        await fleet.admit(engines, 7),
    ):
        assert errors == dict.fromkeys(engines)
    second = cast(EchoProcess, network.hosts["sim://echo-1.0"])
    updated = ["join weights as 2 of 3", "pause retract", "flush", "begin", "end", "resume", "leave weights"]
    assert second.calls == updated

    generation = await client.generate(GenerateRequest(input_ids=[5, 6, 7], sampling={}, routing_key="a"))
    assert generation.output_ids.tolist() == [7, 6, 5]
    assert generation.weight_versions.tolist() == [7, 7, 7]
    assert generation.engines[0] in ("echo-0", "echo-1")
    await supervisor.stop()
    assert network.hosts.keys() == {ROUTER_URL}
