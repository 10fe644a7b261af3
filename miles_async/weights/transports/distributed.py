"""``distributed``: staged buckets are broadcast to the engines, by each sending rank in a process group of its own.

SGLang takes one bucket at a time, so senders take turns, in the same order for all engines: two engines that took
buckets of two senders in different order would wait for each other for ever. Meanwhile the next sender loads its own.
The other half, in the sending ranks, is ``senders/distributed.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from miles_async.errors import EngineError
from miles_async.seams import EngineErrors, EngineFleet, WeightSenders
from miles_async.types import Incarnation, StagedWeights
from miles_async.weights.transports.together import deliver_together, gave_no_answer


@dataclass(frozen=True, slots=True)
class _Groups:
    """The process groups of some engines, one with each sender."""

    names: tuple[str, ...]
    engines: tuple[Incarnation, ...]


class DistributedTransport:
    """Implements WeightTransport. Groups are kept as long as their engines stay the same and none of them fails; there
    are some per set of engines that weights are brought to together.
    """

    sent_fraction = 1.0

    def __init__(
        self, trainer: WeightSenders, fleet: EngineFleet, *, backend: str, flush_cache: bool, name: str = "weights"
    ) -> None:
        """``backend``: "gloo" or "nccl". ``flush_cache``: after every bucket, see ``EngineFleet.receive_bucket``.
        ``name``: of its process groups; one per fleet that the senders send to.
        """
        self._name = name
        self._trainer = trainer
        self._fleet = fleet
        self._backend = backend
        self._flush_cache = flush_cache
        self._groups: list[_Groups] = []
        self._times_joined = 0

    async def prepare(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """A process group of each sender and exactly these engines. If there is none, delivery finds out whose fault it
        is; only who gives no answer, while others do, is told by that alone.
        """
        errors = await self._connect(staged, engines)
        silent = gave_no_answer(errors) if len(gave_no_answer(errors)) < len(engines) else {}
        return {engine: silent.get(engine) for engine in engines}

    async def deliver(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """All buckets to all engines but those that break it."""
        return await deliver_together(partial(self._send, staged), self._fleet.probe, engines)

    async def close(self) -> None:
        """Leave the process groups."""
        for groups in list(self._groups):
            await self._leave(groups.engines)

    async def _connect(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        if any(set(groups.engines) == set(engines) for groups in self._groups):
            return dict.fromkeys(engines)
        await self._leave(engines)
        self._times_joined += 1
        names = tuple(f"{self._name}-{self._times_joined}.{sender}" for sender in range(staged.senders))
        self._groups.append(_Groups(names, tuple(engines)))
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
        """All buckets to all engines, or, as soon as one of them fails, nothing more to anybody."""
        errors = await self._connect(staged, engines)
        if _failed(errors):
            return errors
        [groups] = [groups for groups in self._groups if set(groups.engines) == set(engines)]
        errors = await self._fleet.begin_update(engines)
        for index, following in zip_longest(staged.buckets, tuple(staged.buckets)[1:]):
            if not _failed(errors):
                errors = await self._send_bucket(staged, index, following, engines, groups)
        if not _failed(errors):
            errors = await self._fleet.end_update(engines)
        if _failed(errors):
            async with asyncio.TaskGroup() as scope:  # each takes a deadline of an engine that hangs
                scope.create_task(self._leave(engines))
                scope.create_task(self._fleet.end_update(engines, abandon=True))  # where it has begun
        return errors

    async def _join(self, sender: int, name: str, engines: Sequence[Incarnation], world_size: int) -> EngineErrors:
        """Both ends at once."""
        address, port = await self._trainer.call_sender("open_group", (name, world_size), sender=sender)
        async with asyncio.TaskGroup() as scope:
            scope.create_task(self._trainer.call_sender("join_group", (name,), sender=sender))
            joined = scope.create_task(self._fleet.connect(engines, name, address, port, world_size, self._backend))
        return joined.result()

    async def _leave(self, engines: Sequence[Incarnation]) -> None:
        """All groups that one of ``engines`` is in."""
        for groups in [groups for groups in self._groups if set(groups.engines) & set(engines)]:
            self._groups.remove(groups)
            async with asyncio.TaskGroup() as scope:
                for sender, name in enumerate(groups.names):
                    scope.create_task(self._trainer.call_sender("leave_group", (name,), sender=sender))
                    # Errors don't matter here: who is gone has left, and who can't leave fails the next connect.
                    scope.create_task(self._fleet.disconnect(groups.engines, name))

    async def _send_bucket(
        self, staged: StagedWeights, index: int, following: int | None, engines: Sequence[Incarnation], groups: _Groups
    ) -> EngineErrors:
        """The sender broadcasts while the engines receive, and who sends the ``following`` one loads that."""
        sender, version = index % staged.senders, staged.version
        name = groups.names[sender]
        async with asyncio.TaskGroup() as scope:
            sent = scope.create_task(self._trainer.call_sender("send_bucket", (name, version, index), sender=sender))
            received = scope.create_task(
                self._fleet.receive_bucket(engines, name, staged.buckets[index], version, self._flush_cache)
            )
            if following is not None:
                ahead = following % staged.senders
                load = (groups.names[ahead], version, following)
                scope.create_task(self._trainer.call_sender("load_bucket", load, sender=ahead))
        errors = received.result()
        if (problem := sent.result()) and not _failed(errors):
            return dict.fromkeys(engines, EngineError(problem))
        return errors


def _failed(errors: EngineErrors) -> bool:
    return any(errors.values())
