"""The driver's half of ``distributed``.

All senders broadcast at the same time, each its own buckets in their order. Engines receive the buckets of all senders
in the manifest's order, by themselves where they can (one call per engine), else by a call per bucket. So all members
have reached the oldest bucket that any of them waits for, and none waits forever.

An engine that fails breaks the delivery for all, and the others mostly report that soon. So after a failure these are
to blame: engines that answered, or failed at once, and don't answer a probe afterwards, for whom the silent ones may
have waited; if there are none, engines that gave no answer within their deadline although others did. The rest get
everything again together. If no engine can be blamed it is tried once more with all, and then with each half by itself,
down to an engine that fails alone. If no engine answers at all, which says nothing about any of them, each half is
tried once, and engines that don't answer then are to blame. So a hang costs at most two deadlines, however many engines
there are, and a third one if another engine died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import structlog

from miles_async.arguments.cluster import Device
from miles_async.errors import EngineError, EngineTimeoutError
from miles_async.seams import EngineErrors, InferenceServer, WeightSender, per_engine
from miles_async.types import GroupBackend, Incarnation, StagedWeights
from miles_async.weights.transports.spec import DriverSide

log = structlog.get_logger(__name__)


class Broadcasts(WeightSender, Protocol):
    """The sending rank's half as this one calls it. A broken process group harms neither trainer nor others."""

    def open_group(self, group_name: str, world_size: int) -> tuple[str, int]:
        """Listen for the members of a new process group; return (address, port) for engines to join at."""
        ...

    def join_group(self, group_name: str) -> None:
        """Wait until all members have joined, or for the timeout: members that still wait then report an error."""
        ...

    def send(self, group_name: str, version: int, announce: bool) -> str | None:
        """Broadcast this sender's staged buckets one after another, the bytes of each as one uint8 tensor. Return why
        that failed, or None.

        ``announce``: what engines need to know comes first, which is an int64 and as many bytes of MessagePack: this
        sender's ``StagedWeights.buckets``.
        """
        ...

    def leave_group(self, group_name: str) -> None:
        """Leave the process group; a no-op if there is none of that name."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """Engines that are sent everything together."""

    engines: tuple[Incarnation, ...]
    again: bool = True  # if it fails and no engine can be blamed, retry with all before halving them
    patient: bool = True  # excuse once that no engine answers


class DistributedTransport:
    """Implements WeightTransport.

    Process groups are kept as long as their engines stay the same and none of them fails. Each set of engines that are
    updated together has its own. A process group costs its sender a port, so those with lost engines are left.
    """

    sent_fraction = 1.0

    def __init__(self, side: DriverSide[Broadcasts]) -> None:
        self._name = side.name
        self._sender = side.sender
        self._fleet = side.fleet
        self._backend = process_group_backend(side.device)
        self._kept: dict[frozenset[Incarnation], tuple[str, ...]] = {}  # engines → names, one for each sender
        self._times_joined = 0

    async def prepare(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Set up a process group of each sender with exactly these engines.

        Errors are of engines that are to blame if that fails; if none is, delivery finds out.
        """
        members = await self._fleet.members()
        joined = frozenset[Incarnation]().union(*self._kept)
        await self._leave(joined.difference(members.serving, members.joining))  # which were restarted or removed
        errors = await self._connect(staged, engines)
        blamed = await self._to_blame(errors) if _failed(errors) else {}
        return {engine: blamed.get(engine) for engine in engines}

    async def deliver(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Send all buckets; an engine that breaks the delivery gets an error, and the others get everything again."""
        errors: dict[Incarnation, Exception | None] = {}
        parts = [_Part(tuple(engines))]
        bucketwise = (await self._fleet.members()).bucketwise
        while parts:
            part, *parts = parts
            found = await self._connect(staged, part.engines)
            if not _failed(found):
                names = self._kept[frozenset(part.engines)]
                stream = not any(engine.engine in bucketwise for engine in part.engines)
                async with asyncio.TaskGroup() as scope:
                    sent = scope.create_task(self._broadcast(staged, names, part.engines, announce=stream))
                    for operation, arguments in _receiving(staged, names, stream=stream):
                        if not _failed(found):
                            found = await self._fleet.call(part.engines, operation, *arguments)
                if (problem := sent.result()) and not _failed(found):
                    found = dict.fromkeys(part.engines, EngineError(problem))
                if _failed(found):
                    await self._abandon(part.engines, begun=not stream)
            if _failed(found) and len(part.engines) > 1:
                blamed, divided = await self._divide(part, found)
                errors |= blamed
                parts = [*divided, *parts]
            else:
                errors |= found
        return errors

    async def close(self) -> None:
        for engines in list(self._kept):
            await self._leave(engines)

    async def _divide(
        self, part: _Part, errors: EngineErrors
    ) -> tuple[Mapping[Incarnation, Exception], Sequence[_Part]]:
        """After a failed delivery: the engines to blame, and the parts in which the others are retried."""
        silent = _without_answer(errors)
        again, patient = part.again, part.patient
        none_answered = len(silent) == len(part.engines)
        if none_answered:
            if not patient:
                return silent, ()
            patient = False
        blamed = await self._to_blame(errors)
        log.warning(
            "delivery broke",
            engines=len(part.engines),
            errors=sorted({str(error) for error in errors.values() if error is not None}),
            blamed=[str(engine) for engine in blamed],
        )
        rest = tuple(engine for engine in part.engines if engine not in blamed)
        if blamed:
            return blamed, [_Part(rest, again, patient)] if rest else ()
        if again and not none_answered:
            return blamed, [_Part(rest, False, patient)]
        half = len(rest) // 2
        return blamed, [_Part(rest[:half], again, patient), _Part(rest[half:], again, patient)]

    async def _to_blame(self, errors: EngineErrors) -> dict[Incarnation, Exception]:
        """Engines that broke what failed with these errors, as far as they show."""
        silent = _without_answer(errors)
        if len(silent) == len(errors):
            silent = {}
        suspects = [engine for engine in errors if engine not in silent]
        probed = await self._fleet.call(suspects, InferenceServer.probe, brief=True)
        return {engine: answer for engine, answer in probed.items() if isinstance(answer, Exception)} or silent

    async def _connect(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        if frozenset(engines) in self._kept:
            return dict.fromkeys(engines)
        await self._leave(engines)
        self._times_joined += 1
        names = tuple(f"{self._name}-{self._times_joined}.{sender}" for sender in range(staged.senders))
        self._kept[frozenset(engines)] = names
        ranks = (await self._fleet.members()).ranks
        *first_ranks, world_size = accumulate((ranks.get(engine.engine, 1) for engine in engines), initial=1)
        errors: EngineErrors = dict.fromkeys(engines)
        for sender, name in enumerate(names):
            if not _failed(errors):
                errors = await self._join(sender, name, dict(zip(engines, first_ranks, strict=True)), world_size)
        if _failed(errors):
            await self._leave(engines)
        return errors

    async def _abandon(self, engines: Sequence[Incarnation], *, begun: bool) -> None:
        """Clean up after a broken delivery. ``begun``: engines may have begun an update."""
        async with asyncio.TaskGroup() as scope:  # each takes a deadline of an engine that hangs
            scope.create_task(self._leave(engines))
            if begun:
                scope.create_task(self._fleet.call(engines, InferenceServer.end_update, brief=True))

    async def _join(
        self, sender: int, name: str, first_ranks: Mapping[Incarnation, int], world_size: int
    ) -> EngineErrors:
        """Join sender and engines at the same time."""
        rank = self._sender(sender)
        address, port = await rank.call(Broadcasts.open_group, name, world_size)
        async with asyncio.TaskGroup() as scope:
            scope.create_task(rank.call(Broadcasts.join_group, name))
            arguments = (per_engine(first_ranks), name, address, port, world_size, self._backend)
            joined = scope.create_task(self._fleet.call([*first_ranks], InferenceServer.join_group, *arguments))
        return joined.result()

    async def _leave(self, engines: Collection[Incarnation]) -> None:
        """Leave all process groups of any of ``engines``."""
        for members in [members for members in self._kept if not members.isdisjoint(engines)]:
            async with asyncio.TaskGroup() as scope:
                for sender, name in enumerate(self._kept.pop(members)):
                    scope.create_task(self._sender(sender).call(Broadcasts.leave_group, name))
                    # Errors don't matter: lost engines have left, and one that can't leave fails the next join.
                    scope.create_task(self._fleet.call(sorted(members), InferenceServer.leave_group, name, brief=True))

    async def _broadcast(
        self, staged: StagedWeights, names: Sequence[str], engines: Sequence[Incarnation], *, announce: bool
    ) -> str | None:
        """Send everything from all senders. Returns the reason of a failure, or None."""
        async with asyncio.TaskGroup() as scope:
            sending = [
                scope.create_task(self._sender(sender).call(Broadcasts.send, name, staged.version, announce))
                for sender, name in enumerate(names)
            ]
        problem = next(filter(None, (sent.result() for sent in sending)), None)
        await self._fleet.stream_sent(engines, broken=problem is not None)
        return problem


def _receiving(staged: StagedWeights, names: Sequence[str], *, stream: bool) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Operations by which engines receive everything, and their arguments: one for all buckets, or one for each."""
    if stream:
        yield InferenceServer.receive_stream, (names, staged.version)
        return
    yield InferenceServer.begin_update, ()
    for index, tensors in staged.buckets.items():
        yield InferenceServer.receive_bucket, (names[index % staged.senders], tensors, staged.version)
    yield InferenceServer.end_update, ()


def process_group_backend(device: Device) -> GroupBackend:
    """The torch backend of the process groups, at both ends."""
    return "nccl" if device == "cuda" else "gloo"


def _without_answer(errors: EngineErrors) -> dict[Incarnation, Exception]:
    """The engines whose deadline passed."""
    return {engine: error for engine, error in errors.items() if isinstance(error, EngineTimeoutError)}


def _failed(errors: EngineErrors) -> bool:
    return any(errors.values())
