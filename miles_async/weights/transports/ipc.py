"""``ipc``: engines on the sending rank's own device copy each bucket from its memory.

The other half, in the sending rank, is ``senders/ipc.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from miles_async.runtime.tasks import afterwards
from miles_async.seams import EngineErrors, EngineFleet, WeightSenders
from miles_async.types import Incarnation, StagedWeights
from miles_async.weights.transports.attempt import Attempt


class IpcTransport:
    """Implements WeightTransport."""

    sent_fraction = 1.0

    def __init__(self, trainer: WeightSenders, fleet: EngineFleet, *, flush_cache: bool, name: str = "weights") -> None:
        """``name``: of what is shared; two that share at the same time have different ones."""
        self._name = name
        self._trainer = trainer
        self._fleet = fleet
        self._flush_cache = flush_cache

    async def prepare(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Nothing: a bucket is put on the device when it is its turn."""
        return dict.fromkeys(engines)

    async def deliver(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Bucket by bucket; the device holds one of them at a time."""
        attempt, fleet = Attempt(engines), self._fleet
        await attempt.each(fleet.begin_update)
        async with afterwards(partial(self._trainer.call_sender, "release", (self._name,))):
            for index in staged.buckets:
                handles = await self._trainer.call_sender("share_bucket", (self._name, staged.version, index))
                await attempt.each(partial(self._receive, handles, staged.version))
        await attempt.each(fleet.end_update)
        return attempt.errors

    async def _receive(self, handles: str, version: int, engines: Sequence[Incarnation]) -> EngineErrors:
        return await self._fleet.receive_handles(engines, handles, version, self._flush_cache)

    async def close(self) -> None: ...
