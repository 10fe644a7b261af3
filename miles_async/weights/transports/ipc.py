"""``ipc``: engines on the sending rank's own GPU copy each bucket from its memory, by CUDA IPC handles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from miles_async.runtime.tasks import afterwards
from miles_async.seams import EngineErrors, InferenceServer, WeightSender, per_engine
from miles_async.types import Incarnation, StagedWeights
from miles_async.weights.transports.spec import DriverSide, RankSide, TransportSpec


class SharesMemory(WeightSender, Protocol):
    """The sending rank's half as this one calls it. ``name`` distinguishes memory that is shared at the same time."""

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
        fleet, name = self._side.fleet, self._side.name
        errors = dict(await fleet.call(engines, InferenceServer.begin_update))
        ranks = (await fleet.members()).ranks

        def left() -> list[Incarnation]:
            return [engine for engine, error in errors.items() if error is None]

        async with afterwards(partial(self._sender.call, SharesMemory.release, name)):
            for index in staged.buckets:
                handles = await self._sender.call(SharesMemory.share_bucket, name, staged.version, index)
                each_ranks = per_engine({engine: ranks.get(engine.engine, 1) for engine in engines})
                arguments = (handles, each_ranks, staged.version)
                errors |= await fleet.call(left(), InferenceServer.receive_handles, *arguments)
        return errors | dict(await fleet.call(left(), InferenceServer.end_update))

    async def close(self) -> None: ...


def _rank(side: RankSide) -> SharesMemory:
    from miles_async.weights.transports.ipc_rank import IpcSender

    return IpcSender(side)


SPEC = TransportSpec(name="ipc", driver=IpcTransport, rank=_rank, devices=("cuda",))
