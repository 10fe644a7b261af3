"""``object_store``: Ray's object store brings the staged files to each engine's host, and engines load them there."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from miles_async.seams import WeightSender
from miles_async.types import StagedWeights
from miles_async.weights.files import version_directory
from miles_async.weights.transports.host_files import Source
from miles_async.weights.transports.local_files import LocalFilesTransport
from miles_async.weights.transports.spec import DriverSide, RankSide, TransportSpec


class PutsFiles(WeightSender, Protocol):
    """The sending rank's half as this one calls it."""

    def put_file(self, version: int, name: str) -> list[Source]:
        """Put a staged file into the object store: a list of one reference, which hosts resolve to its bytes.

        In a list, it is not resolved on the way. The bytes stay in the store as long as a reference exists.
        """
        ...


def make_driver(side: DriverSide[PutsFiles]) -> LocalFilesTransport:
    """Hosts get the bytes of files through the object store."""

    async def put(staged: StagedWeights, index: int, name: str) -> Source:
        [reference] = await side.sender(index % staged.senders).call(PutsFiles.put_file, staged.version, name)
        return reference

    return LocalFilesTransport(side, put, put_from_host)


def put_from_host(directory: Path, version: int, name: str) -> list[Source]:
    """Put a file of an engine's host into the object store, as ``PutsFiles.put_file`` does."""
    import ray

    return [ray.put(np.memmap(directory / version_directory(version) / name, np.uint8, mode="r"))]


def _rank(side: RankSide) -> PutsFiles:
    import ray

    from miles_async.weights.transports.object_store_rank import ObjectStoreSender

    return ObjectStoreSender(side.staging, put=ray.put)


SPEC = TransportSpec(
    name="object_store", driver=make_driver, rank=_rank, sender_per_stage=True, delta=True, several_nodes=True
)
