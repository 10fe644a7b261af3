"""What a publication costs: rate and pause, against a plain gloo broadcast of the same bytes and a reload.

The real publisher, transports, staging, sender and receiving loop; synthetic float32 models; instead of engines,
processes that take weights as ours do: join a group, receive the buckets, copy their tensors into parameters, or load
the files. One core each at best, so with more receivers than cores everything is slower, the plain broadcast too.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
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
from miles_async.weights.transports.distributed.driver import Broadcasts
from miles_async.weights.transports.spec import RankSide
from miles_async.weights.update import FleetUpdater
from tests.benchmarks.report import Row

SIZES = {"50M": (1024, 48), "500M": (2048, 119)}  # parameters → width and number of square matrices
ENDS = ((1, 1), (2, 1), (4, 1), (1, 2))  # receivers and senders
ITEM_BYTES = 4  # float32
# Few tensors each, and less than 32 MiB: what glibc takes from the system and gives back every time when it is more.
BUCKET_BYTES = 24 * 2**20
CHANGED = 0.02  # of all elements from version to version, where what changed is sent
CANARY = 32  # tokens
PUBLICATIONS = 3  # of each kind; the best is shown
REQUIRED = 0.8  # of the plain broadcast's rate


# ------------------------------------------------------------------------------------------ in the processes
class Receiver:
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

        from miles_async.engines.sglang.weight_stream import received

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


class Sender:
    """The trainer's sending rank."""

    def __init__(self, directory: str, width: int, matrices: int, delta: bool, sender: int, senders: int) -> None:
        import torch

        from miles_async.weights.transports.distributed.rank import DistributedSender

        torch.set_num_threads(1)
        self.model = model(width, matrices, seed=0)
        self._changing = delta
        self._copy_seconds = 0.0
        staging = StagingOptions(
            parent=Path(directory),
            bucket_bytes=BUCKET_BYTES,
            sender=sender,
            senders=senders,
            digests=delta,
            delta="xor" if delta else None,
        )
        self.sender = DistributedSender(
            RankSide(staging=staging, address="127.0.0.1", device="cpu", timeout_seconds=120)
        )

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


def serve(connection: Connection, kind: type, arguments: tuple[Any, ...]) -> None:
    """Methods of a ``kind`` by name, until told None."""
    part = kind(*arguments)
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

    def __init__(self, kind: type, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, kind, arguments), daemon=True)
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
    size: str, receivers: int, *, senders: int = 1, delta: bool = False
) -> AsyncIterator[tuple[Trainer, Fleet]]:
    with tempfile.TemporaryDirectory() as directory:
        sending = [Process(Sender, directory, *SIZES[size], delta, sender, senders) for sender in range(senders)]
        others = [Process(Receiver, *SIZES[size]) for _ in range(receivers)]
        try:
            for process in (*sending, *others):
                await process.ready()
            yield Trainer(sending), Fleet(others)
        finally:
            for process in (*sending, *others):
                process.end()


async def measure(size: str, receivers: int, senders: int) -> Row:
    async with processes(size, receivers, senders=senders) as (trainer, fleet):
        before = await plain_rates(trainer, fleet)
        distributed, disk = [], []
        for version in range(PUBLICATIONS):
            distributed.append(await publish(trainer, fleet, "distributed", version))
            if senders == 1:  # as in a run
                disk.append(await publish(trainer, fleet, "disk", PUBLICATIONS + version))
        plain, copied = map(max, before, await plain_rates(trainer, fleet))
    best = min(distributed, key=lambda publication: publication.step_seconds["send"])
    rate = best.total_bytes / best.step_seconds["send"]
    return {
        "parameters": size,
        "receivers": receivers,
        "senders": senders,
        "MB_per_second": round(rate / 1e6),
        "plain_gloo_MB_per_second": round(plain / 1e6),
        "of_plain_gloo": round(rate / plain, 2),
        "of_gloo_and_copy": round(rate / copied, 2),
        "meets_goal": rate / plain >= REQUIRED,
        "prepare_seconds": round(best.prepare_seconds, 3),
        "pause_seconds": round(best.pause_seconds, 3),
        "pause_of_total": round(best.pause_seconds / (best.pause_seconds + best.prepare_seconds), 2),
        "canary_seconds": round(best.step_seconds["canary"], 3),
        **({"pause_by_disk_seconds": round(min(each.pause_seconds for each in disk), 3)} if disk else {}),
        **(await measure_delta(size) if receivers == senders == 1 else {}),
    }


async def measure_delta(size: str) -> Row:
    """To one receiver: several on this machine would share its cores for what each engine's node does by itself."""
    async with processes(size, 1, delta=True) as (trainer, fleet):
        first, *deltas = [
            await publish(trainer, fleet, "disk", version, delta="xor") for version in range(1 + PUBLICATIONS)
        ]
    best = min(deltas, key=lambda publication: publication.pause_seconds)
    assert first.sent_fraction == 1.0
    return {
        "delta_sent": round(best.sent_fraction, 3),
        "delta_prepare_seconds": round(best.prepare_seconds, 3),
        "delta_pause_seconds": round(best.pause_seconds, 3),
        "delta_pause_of_total": round(best.pause_seconds / (best.pause_seconds + best.prepare_seconds), 2),
    }


async def publish(trainer: Trainer, fleet: Fleet, transport: str, version: int, delta: str = "off") -> Publication:
    arguments = WeightsArguments(  # what digests take is another benchmark, digests.py
        weight_transport=transport, weight_delta=delta, verify_weights="canary"
    )
    chosen = make_transport(arguments, trainer, fleet, "cpu")  # type: ignore[arg-type]
    updater = FleetUpdater(fleet, chosen, arguments, tolerance=1e-3)  # type: ignore[arg-type]
    publisher = WeightPublisher(trainer, updater, arguments, repairs=updater)  # type: ignore[arg-type]
    publication = await publisher.publish(version)
    await publisher.close()
    return publication


async def plain_rates(trainer: Trainer, fleet: Fleet) -> tuple[float, float]:
    """Bytes per second of as many broadcasts as there are buckets, of memory that everybody has touched: into one
    buffer, and, as engines do, into a new one each time, from where the tensors are copied into parameters.
    """
    await trainer.copy_weights(0)
    staged = await trainer.stage_weights(0)
    sizes = [sum(ITEM_BYTES * math.prod(meta.shape) for meta in bucket) for bucket in staged.buckets.values()]
    sender = trainer.sender(0)
    address, port = await sender.call(Broadcasts.open_group, "plain", 1 + len(fleet.processes))
    engines = (await fleet.members()).serving
    await asyncio.gather(
        sender.call(Broadcasts.join_group, "plain"),
        fleet.connect(engines, "plain", address, port, 1 + len(engines), "gloo"),
    )
    rates = []
    for receive in (("receive_plainly", "plain", sizes), ("receive_all", "plain", tuple(staged.buckets.values()))):
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            await asyncio.gather(
                trainer.processes[0].call("send_plainly", "plain", sizes),
                fleet._each(engines, *receive),
            )
            seconds.append(time.perf_counter() - started)
        rates.append(sum(sizes) / min(seconds))
    await asyncio.gather(sender.call(Broadcasts.leave_group, "plain"), fleet.disconnect(engines, "plain"))
    return rates[0], rates[1]


def rows(sizes: Sequence[str] = tuple(SIZES), ends: Sequence[tuple[int, int]] = ENDS) -> Iterator[Row]:
    """One per size of the model and number of receivers and senders."""
    for size in sizes:
        for receivers, senders in ends:
            yield asyncio.run(measure(size, receivers, senders))
