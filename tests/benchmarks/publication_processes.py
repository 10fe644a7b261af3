"""Processes that publications are measured with: senders that are a trainer's sending ranks but for the training, and
receivers that take weights as engines do.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from miles_async.arguments.weights import WeightsArguments
from miles_async.trainer.ranks import united
from miles_async.types import CanaryScore, FleetMembers, Incarnation, Publication, StagedWeights, TensorMeta
from miles_async.weights.publisher import WeightPublisher
from miles_async.weights.staging_options import StagingOptions
from miles_async.weights.transports.choice import make_transport
from miles_async.weights.transports.spec import RankSide
from miles_async.weights.update import FleetUpdater

SIZES = {"50M": (1024, 48), "500M": (2048, 119)}  # parameters → width and number of square matrices
# Few tensors each, and less than 32 MiB: what glibc takes from the system and gives back every time when it is more.
BUCKET_BYTES = 24 * 2**20
CHANGED = 0.02  # of all elements from version to version, where what changed is sent
CANARY = 32  # tokens


@dataclass(frozen=True)
class Place:
    """Where a process runs: on this host, or on a machine of ``tests/cluster``."""

    address: str = "127.0.0.1"
    first_process: int | None = None  # id of the machine's, as this host sees it

    def enter(self) -> None:
        """Use the machine's network only, and share no memory with other machines."""
        if self.first_process is None:
            return
        from miles_async.engines.sglang import relay

        with open(f"/proc/{self.first_process}/ns/net") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _NEW_NETWORK) == 0
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        node = self.first_process
        relay._node = lambda: node


HERE = Place()
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


# ------------------------------------------------------------------------------------------ in the processes
class Part:
    """Something that runs in a process of its own."""

    def cpu_seconds(self) -> float:
        return time.process_time()


class Receiver(Part):
    """An engine's end."""

    def __init__(self, width: int, matrices: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as SGLang has, its own
        self.parameters = model(width, matrices, seed=1)
        self.groups: dict[str, Any] = {}
        self._directory = tempfile.TemporaryDirectory()

    def join(self, name: str, rank: int, address: str, port: int, world_size: int) -> None:
        from tests.integration.weight_receiver import init_custom_process_group

        self.groups[name] = init_custom_process_group(address, port, name, rank, world_size)

    def leave(self, name: str) -> None:
        import torch.distributed as dist

        dist.destroy_process_group(self.groups.pop(name))

    def receive(self, name: str, metas: tuple[TensorMeta, ...]) -> None:
        import torch
        import torch.distributed as dist

        sizes = [self.parameters[meta.name].nbytes for meta in metas]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.groups[name])
        for meta, part in zip(metas, data.split(sizes), strict=True):
            self.parameters[meta.name].copy_(part.view(torch.float32).reshape(meta.shape))

    def receive_plainly(self, name: str, sizes: Sequence[int]) -> None:
        import torch
        import torch.distributed as dist

        data = torch.empty(max(sizes), dtype=torch.uint8)
        for size in sizes:
            dist.broadcast(data[:size], src=0, group=self.groups[name])

    def receive_stream(self, names: Sequence[str]) -> None:
        import torch

        from miles_async.engines.sglang.stream_buckets import received

        for tensors in received([self.groups[name] for name in names], torch.device("cpu")):
            for name, tensor in tensors:
                self.parameters[name].copy_(tensor)

    def receive_all(self, name: str, buckets: Sequence[tuple[TensorMeta, ...]]) -> None:
        for metas in buckets:
            self.receive(name, metas)

    def load(self, directory: str) -> None:
        from safetensors.torch import load_file

        for path in Path(directory).glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                self.parameters[name].copy_(tensor)

    def on_host(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return function(Path(self._directory.name), *arguments)

    def score(self) -> float:
        """As much as a forward pass of the canary."""
        import torch

        hidden = torch.ones(CANARY, next(iter(self.parameters.values())).shape[1])
        for parameter in self.parameters.values():
            hidden = torch.tanh(hidden @ parameter)
        return float(hidden.sum())


class Sender(Part):
    """The trainer's sending rank."""

    def __init__(
        self,
        directory: str,
        address: str,
        width: int,
        matrices: int,
        *,
        delta: bool,
        bucket_bytes: int,
        sender: int,
        senders: int,
    ) -> None:
        import torch

        from miles_async.weights.transports.distributed.rank import DistributedSender

        torch.set_num_threads(1)
        self.model = model(width, matrices, seed=0)
        self._changing = delta
        self._copy_seconds = 0.0
        staging = StagingOptions(
            parent=Path(directory),
            bucket_bytes=bucket_bytes,
            sender=sender,
            senders=senders,
            digests=delta,
            delta="xor" if delta else None,
        )
        self.sender = DistributedSender(RankSide(staging=staging, address=address, device="cpu", timeout_seconds=120))

    def copy(self, version: int) -> None:
        if self._changing:
            self._step()
        started = time.perf_counter()
        self.sender.copy(version, self.model.items())
        self._copy_seconds = time.perf_counter() - started

    def stage(self, version: int) -> StagedWeights:
        started = time.perf_counter()
        staged = self.sender.stage(version)
        seconds = self._copy_seconds + time.perf_counter() - started
        return msgspec.structs.replace(staged, copy_seconds=self._copy_seconds, prepare_seconds=seconds)

    def _step(self) -> None:

        for tensor in self.model.values():
            tensor.view(-1)[:: round(1 / CHANGED)] *= 1 + 2**-8

    def send_plainly(self, name: str, sizes: Sequence[int]) -> None:
        import torch
        import torch.distributed as dist

        data = torch.ones(max(sizes), dtype=torch.uint8)
        group = self.sender._groups[name]._process_group
        for size in sizes:
            dist.broadcast(data[:size], src=0, group=group)

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return getattr(self.sender, method.__name__)(*arguments)


def model(width: int, matrices: int, seed: int) -> dict[str, Any]:
    import torch

    draw = torch.Generator().manual_seed(seed)
    block = torch.randn(width, width, generator=draw) / width**0.5
    return {f"layers.{index}.linear.weight": block + index * 1e-3 for index in range(matrices)}


def serve(connection: Connection, make: Callable[[], Part], place: Place) -> None:
    """Call methods of a part by name, until told None."""
    place.enter()
    part = make()
    connection.send(None)
    while (call := connection.recv()) is not None:
        method, *rest = call
        try:
            connection.send(getattr(part, method)(*rest))
        except Exception as error:  # supervision point: the driver raises it
            connection.send(error)


# ------------------------------------------------------------------------------------------------ in the driver
class Process:
    """One of them."""

    def __init__(self, make: Callable[[], Part], place: Place) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, make, place), daemon=True)
        self._process.start()
        self._lock = asyncio.Lock()  # one call at a time, in their order

    async def ready(self) -> None:
        await asyncio.to_thread(self._connection.recv)

    async def call(self, *call: Any) -> Any:
        async with self._lock:
            self._connection.send(call)
            result = await asyncio.to_thread(self._connection.recv)
        if isinstance(result, Exception):
            raise result
        return result

    def end(self) -> None:
        self._process.kill()
        self._process.join()


class Trainer:
    """TrainerSide, as far as a publication needs one."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = processes

    async def copy_weights(self, version: int) -> None:
        await asyncio.gather(*(process.call("copy", version) for process in self.processes))

    async def stage_weights(self, version: int) -> StagedWeights:
        staged = united(await asyncio.gather(*(process.call("stage", version) for process in self.processes)))
        return msgspec.structs.replace(staged, canary_tokens=tuple(range(CANARY)), canary_logprobs=(0.0,))

    def sender(self, index: int, *, repair: bool = False) -> Any:
        return _Handle(self.processes[index])


class _Handle:
    def __init__(self, process: Process) -> None:
        self._process = process

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await self._process.call("call", method, *arguments)


class Fleet:
    """EngineFleet of receivers."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = {f"engine-{index}": process for index, process in enumerate(processes)}
        self.version = -1

    async def members(self) -> FleetMembers:
        return FleetMembers(
            serving=tuple(Incarnation(engine, 0) for engine in self.processes),
            joining=(),
            starting=(),
            ranks=dict.fromkeys(self.processes, 1),
        )

    async def weight_versions(self, engines: Sequence[Incarnation]) -> Mapping[Incarnation, str]:
        return dict.fromkeys(engines, str(self.version))

    async def connect(
        self, engines: Sequence[Incarnation], name: str, address: str, port: int, world_size: int, backend: str
    ) -> Mapping[Incarnation, None]:
        async with asyncio.TaskGroup() as scope:
            for rank, engine in enumerate(engines, start=1):
                scope.create_task(self.processes[engine.engine].call("join", name, rank, address, port, world_size))
        return dict.fromkeys(engines)

    async def disconnect(self, engines: Sequence[Incarnation], name: str) -> Mapping[Incarnation, None]:
        return await self._each(engines, "leave", name)

    async def receive_stream(
        self, engines: Sequence[Incarnation], names: Sequence[str], version: int, flush_cache: bool
    ) -> Mapping[Incarnation, None]:
        self.version = version
        return await self._each(engines, "receive_stream", tuple(names))

    async def stream_sent(self, names: Sequence[str], *, broken: bool) -> None:
        assert not broken

    async def load_files(
        self, directories: Mapping[Incarnation, str], version: int, flush_cache: bool
    ) -> Mapping[Incarnation, None]:
        self.version = version
        return await self._each(tuple(directories), "load", next(iter(directories.values())))

    async def score(self, engines: Sequence[Incarnation], tokens: Sequence[int]) -> Mapping[Incarnation, CanaryScore]:
        await self._each(engines, "score")
        return dict.fromkeys(engines, CanaryScore(str(self.version), (0.0,)))

    async def on_host(
        self,
        engines: Sequence[Incarnation],
        function: Callable[..., Any],
        *arguments: Any,
        room: int = 0,
    ) -> Mapping[Incarnation, Any]:
        return {engine: await self.processes[engine.engine].call("on_host", function, arguments) for engine in engines}

    async def _each(self, engines: Sequence[Incarnation], *call: Any) -> Mapping[Incarnation, None]:
        async with asyncio.TaskGroup() as scope:
            for engine in engines:
                scope.create_task(self.processes[engine.engine].call(*call))
        return dict.fromkeys(engines)

    async def _nothing(self, engines: Sequence[Incarnation], *_: Any) -> Mapping[Incarnation, None]:
        return dict.fromkeys(engines)

    probe = pause = flush_cache = resume = admit = _nothing


@asynccontextmanager
async def processes(
    size: str,
    receiving: Sequence[Place],
    *,
    sending: Sequence[Place] = (HERE,),
    bucket_bytes: int = BUCKET_BYTES,
    delta: bool = False,
) -> AsyncIterator[tuple[Trainer, Fleet]]:
    with tempfile.TemporaryDirectory() as directory:
        options = {"delta": delta, "bucket_bytes": bucket_bytes, "senders": len(sending)}
        senders = [
            Process(partial(Sender, directory, place.address, *SIZES[size], sender=index, **options), place)
            for index, place in enumerate(sending)
        ]
        others = [Process(partial(Receiver, *SIZES[size]), place) for place in receiving]
        try:
            for process in (*senders, *others):
                await process.ready()
            yield Trainer(senders), Fleet(others)
        finally:
            for process in (*senders, *others):
                process.end()


@dataclass(frozen=True)
class Published:
    """A publication, and the CPU seconds that its delivery took in all processes."""

    publication: Publication
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.publication.total_bytes / self.publication.step_seconds["send"]


async def publish(
    trainer: Trainer, fleet: Fleet, transport: str, version: int, delta: str = "off", verify: str = "canary"
) -> Published:
    """Publish a version; what digests take is another benchmark, digests.py."""
    arguments = WeightsArguments(weight_transport=transport, weight_delta=delta, verify_weights=verify)
    chosen = make_transport(arguments, trainer, fleet, "cpu")  # type: ignore[arg-type]
    cpu_seconds, deliver = 0.0, chosen.deliver

    async def measured(*call: Any) -> Any:
        nonlocal cpu_seconds
        before = await total_cpu_seconds(trainer, fleet)
        result = await deliver(*call)
        cpu_seconds = await total_cpu_seconds(trainer, fleet) - before
        return result

    chosen.deliver = measured  # type: ignore[method-assign]
    updater = FleetUpdater(fleet, chosen, arguments, tolerance=1e-3)  # type: ignore[arg-type]
    publisher = WeightPublisher(trainer, updater, arguments, repairs=updater)  # type: ignore[arg-type]
    publication = await publisher.publish(version)
    await publisher.close()
    return Published(publication, cpu_seconds)


async def total_cpu_seconds(trainer: Trainer, fleet: Fleet) -> float:
    """CPU seconds of all processes so far."""
    return sum([await process.call("cpu_seconds") for process in (*trainer.processes, *fleet.processes.values())])
