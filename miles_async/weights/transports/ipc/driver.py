"""The driver's half of ``ipc``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from miles_async.runtime.tasks import afterwards
from miles_async.seams import EngineErrors, WeightSender
from miles_async.types import Incarnation, StagedWeights
from miles_async.weights.survivors import Survivors
from miles_async.weights.transports.spec import DriverSide


class SharesMemory(WeightSender, Protocol):
    """The sending rank's half as this one calls it. ``name`` tells apart what is shared at the same time."""

    def share_bucket(self, name: str, version: int, index: int) -> str:
        """Put a bucket into device memory and return its handle.

        The memory stays until the next call with that name, or :meth:`release`.
        """
        ...

    def release(self, name: str) -> None:
        """Free the memory that was shared under ``name``, once engines have copied it."""
        ...


class IpcTransport:
    """Implements WeightTransport."""

    sent_fraction = 1.0

    def __init__(self, side: DriverSide[SharesMemory]) -> None:
        self._side = side
        self._sender = side.sender(0)

    async def prepare(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Do nothing: each bucket is put on the device when it is sent."""
        return dict.fromkeys(engines)

    async def deliver(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Bucket by bucket; the device holds one of them at a time."""
        survivors, fleet, name = Survivors(engines), self._side.fleet, self._side.name
        await survivors.each(fleet.begin_update)
        async with afterwards(partial(self._sender.call, SharesMemory.release, name)):
            for index in staged.buckets:
                handles = await self._sender.call(SharesMemory.share_bucket, name, staged.version, index)
                await survivors.each(partial(self._receive, handles, staged.version))
        await survivors.each(fleet.end_update)
        return survivors.errors

    async def _receive(self, handles: str, version: int, engines: Sequence[Incarnation]) -> EngineErrors:
        return await self._side.fleet.receive_handles(engines, handles, version, self._side.flush_cache)

    async def close(self) -> None: ...
