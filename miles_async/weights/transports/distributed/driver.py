"""The driver's half of ``distributed``.

All senders broadcast at the same time, each its own buckets in their order. Engines receive the buckets of all senders
in the manifest's order, by themselves where they can (one call per engine), else by a call per bucket. So the oldest
bucket that somebody waits for is one that everybody has come to, and nobody waits forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from miles_async.arguments.cluster import Device
from miles_async.errors import EngineError
from miles_async.seams import EngineErrors, WeightSender
from miles_async.types import GroupBackend, Incarnation, StagedWeights
from miles_async.weights.transports.distributed.together import deliver_together, gave_no_answer
from miles_async.weights.transports.spec import DriverSide


class Broadcasts(WeightSender, Protocol):
    """The sending rank's half as this one calls it. A process group that breaks costs neither trainer nor others."""

    def open_group(self, group_name: str, world_size: int) -> tuple[str, int]:
        """Listen for the members of a new process group; return (address, port) for engines to join at."""
        ...

    def join_group(self, group_name: str) -> None:
        """Wait until all members have joined or the timeout has passed: then those that wait for the others are told so
        and report it themselves.
        """
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
class _ProcessGroups:
    """The process groups of some engines, one with each sender."""

    names: tuple[str, ...]
    engines: tuple[Incarnation, ...]


class DistributedTransport:
    """Implements WeightTransport.

    Process groups are kept as long as their engines stay the same and none of them fails. Each set of engines that are
    updated together has its own. A process group costs its sender a port, so those of engines that are gone are left.
    """

    sent_fraction = 1.0

    def __init__(self, side: DriverSide[Broadcasts]) -> None:
        self._name = side.name
        self._sender = side.sender
        self._fleet = side.fleet
        self._backend = process_group_backend(side.device)
        self._flush_cache = side.flush_cache
        self._kept: list[_ProcessGroups] = []
        self._times_joined = 0

    async def prepare(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Set up a process group of each sender with exactly these engines.

        If that fails, delivery finds out which engine is to blame. Only engines that gave no answer while others did
        are known to be.
        """
        await self._leave_lost()
        errors = await self._connect(staged, engines)
        silent = gave_no_answer(errors) if len(gave_no_answer(errors)) < len(engines) else {}
        return {engine: silent.get(engine) for engine in engines}

    async def deliver(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Send all buckets to all engines but those that break the delivery."""
        return await deliver_together(partial(self._send, staged), self._fleet.probe, engines)

    async def close(self) -> None:
        """Leave the process groups."""
        for groups in list(self._kept):
            await self._leave(groups.engines)

    async def _connect(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        if any(set(groups.engines) == set(engines) for groups in self._kept):
            return dict.fromkeys(engines)
        await self._leave(engines)
        self._times_joined += 1
        names = tuple(f"{self._name}-{self._times_joined}.{sender}" for sender in range(staged.senders))
        self._kept.append(_ProcessGroups(names, tuple(engines)))
        ranks = (await self._fleet.members()).ranks
        world_size = 1 + sum(ranks.get(engine.engine, 1) for engine in engines)
        errors: EngineErrors = dict.fromkeys(engines)
        for sender, name in enumerate(names):
            if not _failed(errors):
                errors = await self._join(sender, name, engines, world_size)
        if _failed(errors):
            await self._leave(engines)
        return errors

    async def _send(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Send all buckets to all engines; an engine that fails breaks this for all of them."""
        errors = await self._connect(staged, engines)
        if _failed(errors):
            return errors
        [groups] = [groups for groups in self._kept if set(groups.engines) == set(engines)]
        bucketwise = (await self._fleet.members()).bucketwise
        by_themselves = not any(engine.engine in bucketwise for engine in engines)
        async with asyncio.TaskGroup() as scope:
            received = scope.create_task(
                self._fleet.receive_stream(engines, groups.names, staged.version, self._flush_cache)
                if by_themselves
                else self._receive_buckets(staged, engines, groups)
            )
            sent = scope.create_task(self._broadcast(staged, groups, announce=by_themselves))
        errors = received.result()
        if (problem := sent.result()) and not _failed(errors):
            errors = dict.fromkeys(engines, EngineError(problem))
        if _failed(errors):
            async with asyncio.TaskGroup() as scope:  # each takes a deadline of an engine that hangs
                scope.create_task(self._leave(engines))
                if not by_themselves:
                    scope.create_task(self._fleet.end_update(engines, abandon=True))  # where it has begun
        return errors

    async def _join(self, sender: int, name: str, engines: Sequence[Incarnation], world_size: int) -> EngineErrors:
        """Join sender and engines at the same time."""
        rank = self._sender(sender)
        address, port = await rank.call(Broadcasts.open_group, name, world_size)
        async with asyncio.TaskGroup() as scope:
            scope.create_task(rank.call(Broadcasts.join_group, name))
            joined = scope.create_task(self._fleet.connect(engines, name, address, port, world_size, self._backend))
        return joined.result()

    async def _leave_lost(self) -> None:
        """Leave the process groups with an engine that was restarted or scaled away, whoever is updated now."""
        members = await self._fleet.members()
        joined = {engine for groups in self._kept for engine in groups.engines}
        await self._leave(joined.difference(members.serving, members.joining))

    async def _leave(self, engines: Collection[Incarnation]) -> None:
        """Leave all process groups that one of ``engines`` is in."""
        for groups in [groups for groups in self._kept if set(groups.engines) & set(engines)]:
            self._kept.remove(groups)
            async with asyncio.TaskGroup() as scope:
                for sender, name in enumerate(groups.names):
                    scope.create_task(self._sender(sender).call(Broadcasts.leave_group, name))
                    # Errors don't matter: engines that are gone have left, those that can't leave fail the next join.
                    scope.create_task(self._fleet.disconnect(groups.engines, name))

    async def _broadcast(self, staged: StagedWeights, groups: _ProcessGroups, *, announce: bool) -> str | None:
        """Send everything from all senders. Returns the reason of a failure, or None."""
        async with asyncio.TaskGroup() as scope:
            sending = [
                scope.create_task(self._sender(sender).call(Broadcasts.send, name, staged.version, announce))
                for sender, name in enumerate(groups.names)
            ]
        problem = next(filter(None, (sent.result() for sent in sending)), None)
        await self._fleet.stream_sent(groups.names, broken=problem is not None)
        return problem

    async def _receive_buckets(
        self, staged: StagedWeights, engines: Sequence[Incarnation], groups: _ProcessGroups
    ) -> EngineErrors:
        """Tell the engines to receive one bucket after another, until one of them fails."""
        errors = await self._fleet.begin_update(engines)
        for index, tensors in staged.buckets.items():
            if not _failed(errors):
                name = groups.names[index % staged.senders]
                errors = await self._fleet.receive_bucket(engines, name, tensors, staged.version, self._flush_cache)
        return errors if _failed(errors) else await self._fleet.end_update(engines)


def process_group_backend(device: Device) -> GroupBackend:
    """The torch backend of the process groups, at both ends."""
    return "nccl" if device == "cuda" else "gloo"


def _failed(errors: EngineErrors) -> bool:
    return any(errors.values())
