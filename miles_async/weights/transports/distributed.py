"""``distributed``: staged buckets are broadcast over one process group of the sending rank and the engines.

The other half, in the sending rank, is ``senders/distributed.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_async.protocols import EngineErrors, EngineFleet, TrainerSide
from miles_async.types import StagedWeights


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    engines: Mapping[str, int]  # with their incarnations


class DistributedTransport:
    """Implements WeightTransport. A group is kept as long as its engines stay the same and none of them fails; there
    is one per set of engines that weights are brought to together.
    """

    shares_fate = True  # a member that fails breaks the group for all, and whose fault it was can't be told
    sent_fraction = 1.0

    def __init__(
        self, trainer: TrainerSide, fleet: EngineFleet, *, backend: str, flush_cache: bool, name: str = "weights"
    ) -> None:
        """``backend``: "gloo" or "nccl". ``flush_cache``: after every bucket, see ``EngineFleet.receive_bucket``.
        ``name``: of its process groups; one per fleet that the sender sends to.
        """
        self._name = name
        self._trainer = trainer
        self._fleet = fleet
        self._backend = backend
        self._flush_cache = flush_cache
        self._groups: list[_Group] = []
        self._groups_made = 0

    async def prepare(self, staged: StagedWeights, engines: Sequence[str]) -> EngineErrors:
        """One process group of the sending rank and exactly these engines."""
        members = await self._fleet.members()
        wanted = {engine: members.incarnations.get(engine, 0) for engine in engines}
        if any(group.engines == wanted for group in self._groups):
            return dict.fromkeys(engines)
        await self._leave(engines)
        world_size = 1 + sum(members.ranks.get(engine, 1) for engine in engines)
        self._groups_made += 1
        group = _Group(f"{self._name}-{self._groups_made}", wanted)
        address, port = await self._trainer.call_sender("open_group", (group.name, world_size))
        self._groups.append(group)
        errors = await self._together(
            self._trainer.call_sender("join_group", (group.name,)),
            self._fleet.connect(engines, group.name, address, port, world_size, self._backend),
        )
        if _failed(errors):
            await self._leave(engines)
        return errors

    async def deliver(self, staged: StagedWeights, engines: Sequence[str]) -> EngineErrors:
        """All buckets to all engines, or, as soon as one of them fails, nothing more to anybody."""
        errors = await self.prepare(staged, engines)
        if _failed(errors):
            return errors
        [group] = [group for group in self._groups if group.engines.keys() == set(engines)]
        errors = await self._fleet.begin_update(engines)
        for index in range(len(staged.buckets)):
            if not _failed(errors):
                errors = await self._send_bucket(staged, index, engines, group.name)
        if not _failed(errors):
            errors = await self._fleet.end_update(engines)
        if _failed(errors):
            await self._leave(engines)
            await self._fleet.end_update(engines)  # of those that had begun; a session must not stay open
        return errors

    async def close(self) -> None:
        """Leave the process groups."""
        for group in list(self._groups):
            await self._leave(tuple(group.engines))

    async def _leave(self, engines: Sequence[str]) -> None:
        """All groups that one of ``engines`` is in."""
        for group in [group for group in self._groups if group.engines.keys() & set(engines)]:
            self._groups.remove(group)
            await self._trainer.call_sender("leave_group", (group.name,))
            # Errors don't matter here: who is gone has left, and who can't leave fails the next connect.
            await self._fleet.disconnect(tuple(group.engines), group.name)

    async def _send_bucket(self, staged: StagedWeights, index: int, engines: Sequence[str], name: str) -> EngineErrors:
        """Both ends at once: the trainer broadcasts while the engines receive."""
        tensors = staged.buckets[index]
        return await self._together(
            self._trainer.call_sender("send_bucket", (name, staged.version, index)),
            self._fleet.receive_bucket(engines, name, tensors, staged.version, self._flush_cache),
        )

    @staticmethod
    async def _together(
        sending: Coroutine[Any, Any, None], receiving: Coroutine[Any, Any, EngineErrors]
    ) -> EngineErrors:
        async with asyncio.TaskGroup() as scope:
            scope.create_task(sending)
            received = scope.create_task(receiving)
        return received.result()


def _failed(errors: EngineErrors) -> bool:
    return any(errors.values())
