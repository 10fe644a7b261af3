"""``distributed``: staged buckets are broadcast over one process group of the sending rank and the engines.

The other half, in the sending rank, is ``senders/distributed.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from miles_async.protocols import EngineErrors, EngineFleet, TrainerSide
from miles_async.types import StagedWeights


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    engines: tuple[str, ...]


class DistributedTransport:
    """Implements WeightTransport. The group is kept as long as engines stay the same and nobody fails."""

    shares_fate = True  # a member that fails breaks the group for all, and whose fault it was can't be told
    sent_fraction = 1.0

    def __init__(self, trainer: TrainerSide, fleet: EngineFleet, *, backend: str, flush_cache: bool) -> None:
        """``backend``: "gloo" or "nccl". ``flush_cache``: after every bucket, see ``EngineFleet.receive_bucket``."""
        self._trainer = trainer
        self._fleet = fleet
        self._backend = backend
        self._flush_cache = flush_cache
        self._group: _Group | None = None
        self._groups_made = 0

    async def prepare(self, staged: StagedWeights, engines: Sequence[str]) -> EngineErrors:
        """One process group of the sending rank and exactly these engines."""
        if self._group is not None and set(self._group.engines) == set(engines):
            return dict.fromkeys(engines)
        await self.close()
        ranks = (await self._fleet.members()).ranks
        world_size = 1 + sum(ranks.get(engine, 1) for engine in engines)
        self._groups_made += 1
        name = f"weights-{self._groups_made}"
        address, port = await self._trainer.call_sender("open_group", (name, world_size))
        self._group = _Group(name, tuple(engines))
        errors = await self._together(
            self._trainer.call_sender("join_group", (name,)),
            self._fleet.connect(engines, name, address, port, world_size, self._backend),
        )
        if _failed(errors):
            await self.close()
        return errors

    async def deliver(self, staged: StagedWeights, engines: Sequence[str]) -> EngineErrors:
        """All buckets to all engines, or, as soon as one of them fails, nothing more to anybody."""
        errors = await self.prepare(staged, engines)
        if _failed(errors):
            return errors
        errors = await self._fleet.begin_update(engines)
        for index in range(len(staged.buckets)):
            if not _failed(errors):
                errors = await self._send_bucket(staged, index, engines)
        if not _failed(errors):
            errors = await self._fleet.end_update(engines)
        if _failed(errors):
            await self.close()
            await self._fleet.end_update(engines)  # of those that had begun; a session must not stay open
        return errors

    async def close(self) -> None:
        """Leave the process group."""
        if self._group is None:
            return
        group, self._group = self._group, None
        await self._trainer.call_sender("leave_group", (group.name,))
        # Errors don't matter here: who is gone has left, and who can't leave fails the next connect.
        await self._fleet.disconnect(group.engines, group.name)

    async def _send_bucket(self, staged: StagedWeights, index: int, engines: Sequence[str]) -> EngineErrors:
        """Both ends at once: the trainer broadcasts while the engines receive."""
        assert self._group is not None
        name, tensors = self._group.name, staged.buckets[index]
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
