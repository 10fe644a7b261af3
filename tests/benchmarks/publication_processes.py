"""Publications to measure: processes of their ends, and the sides of a run that drive them."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from miles_async.arguments.weights import WeightsArguments
from miles_async.runtime.files.scratch import MEMORY
from miles_async.seams import arguments_of
from miles_async.trainer.ranks import united
from miles_async.types import CanaryScore, FleetMembers, Incarnation, Publication, StagedWeights
from miles_async.weights.publisher import WeightPublisher
from miles_async.weights.transports.choice import make_transport
from miles_async.weights.update import FleetUpdater
from tests.benchmarks.publication_parts import BUCKET_BYTES, CANARY, HERE, SIZES, Part, Place, Receiver, Sender, serve
from tests.fakes.fake_sides import publish


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

    async def call(self, *call: object) -> Any:
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

    async def call(self, method: Callable[..., object], *arguments: object) -> Any:
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

    async def call(
        self, engines: Sequence[Incarnation], operation: Callable[..., object], *arguments: object, brief: bool = False
    ) -> Mapping[Incarnation, Any]:
        match operation.__name__, arguments:
            case "weight_version", ():
                return dict.fromkeys(engines, str(self.version))
            case "join_group", (first_ranks, name, address, port, world_size, _):
                async with asyncio.TaskGroup() as scope:
                    for engine in engines:
                        join = (name, *arguments_of(engine, [first_ranks]), address, port, world_size)
                        scope.create_task(self.processes[engine.engine].call("join", *join))
                return dict.fromkeys(engines)
            case "leave_group", (name,):
                return await self._each(engines, "leave", name)
            case "receive_stream", (names, version):
                self.version = version
                return await self._each(engines, "receive_stream", tuple(names))
            case "load_files", (directories, version):
                self.version = version
                return await self._each(engines, "load", *arguments_of(engines[0], [directories]))
            case "score", _:
                await self._each(engines, "score")
                return dict.fromkeys(engines, CanaryScore(str(self.version), np.zeros(1, np.float32)))
        return dict.fromkeys(engines)

    async def stream_sent(self, engines: Sequence[Incarnation], *, broken: bool) -> None:
        assert not broken

    async def on_host(
        self, engines: Sequence[Incarnation], function: Callable[..., object], *arguments: object, room: int = 0
    ) -> Mapping[Incarnation, object]:
        return {engine: await self.processes[engine.engine].call("on_host", function, arguments) for engine in engines}

    async def _each(self, engines: Sequence[Incarnation], *call: object) -> Mapping[Incarnation, None]:
        async with asyncio.TaskGroup() as scope:
            for engine in engines:
                scope.create_task(self.processes[engine.engine].call(*call))
        return dict.fromkeys(engines)

    async def _nothing(self, engines: Sequence[Incarnation], *_: object) -> Mapping[Incarnation, None]:
        return dict.fromkeys(engines)

    admit = begin_trial = _nothing


@asynccontextmanager
async def processes(
    size: str,
    receiving: Sequence[Place],
    *,
    sending: Sequence[Place] = (HERE,),
    bucket_bytes: int = BUCKET_BYTES,
    delta: bool = False,
) -> AsyncIterator[tuple[Trainer, Fleet]]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:  # where a run stages if there is room
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


Publish = Callable[[int], Awaitable[Published]]
"""Publishes a version."""


@asynccontextmanager
async def publisher(
    trainer: Trainer, fleet: Fleet, transport: str, delta: str = "off", verify: str = "canary"
) -> AsyncIterator[Publish]:
    """A publisher, which keeps its process groups as that of a run does. What digests take is another benchmark,
    digests.py.
    """
    arguments = WeightsArguments(weight_transport=transport, weight_delta=delta, verify_weights=verify)
    chosen = make_transport(arguments, trainer, fleet, "cpu")  # type: ignore[arg-type]
    cpu_seconds, deliver = 0.0, chosen.deliver

    async def measured(*call: object) -> Any:
        nonlocal cpu_seconds
        before = await total_cpu_seconds(trainer, fleet)
        result = await deliver(*call)
        cpu_seconds = await total_cpu_seconds(trainer, fleet) - before
        return result

    chosen.deliver = measured  # type: ignore[method-assign]
    updater = FleetUpdater(fleet, chosen, arguments, tolerance=1e-3)  # type: ignore[arg-type]
    publishing = WeightPublisher(trainer, updater, arguments, repairs=updater)  # type: ignore[arg-type]

    async def next_version(version: int) -> Published:
        return Published(await publish(publishing, version), cpu_seconds)

    yield next_version
    await publishing.close()


async def total_cpu_seconds(trainer: Trainer, fleet: Fleet) -> float:
    """CPU seconds of all processes so far."""
    return sum([await process.call("cpu_seconds") for process in (*trainer.processes, *fleet.processes.values())])
