"""``disk``: engines load the staged files, from a file system that the sending rank and all engines share.

The rank's half is ``Staging`` itself, which writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_async.errors import ConfigurationError
from miles_async.seams import EngineErrors, InferenceServer, WeightSender, WeightTransport
from miles_async.types import Incarnation, StagedWeights
from miles_async.weights.files import MANIFEST
from miles_async.weights.transports.local_files import LocalFilesTransport
from miles_async.weights.transports.spec import DriverSide, RankSide, TransportSpec


def make_driver(side: DriverSide[WeightSender]) -> WeightTransport:
    """Engines load the staged files in place, or, with deltas, apply the changes to files on each host."""
    return LocalFilesTransport(side, _path) if side.delta else DiskTransport(side)


class DiskTransport:
    """Implements WeightTransport: engines load the staged files in place."""

    sent_fraction = 1.0

    def __init__(self, side: DriverSide[WeightSender]) -> None:
        self._fleet = side.fleet

    async def prepare(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Check that each host sees the files: SGLang would look for a missing directory on a model hub."""
        return await self._fleet.on_host(engines, expect_staged, staged.directory)

    async def deliver(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        arguments = (staged.directory, staged.version)
        return await self._fleet.call(engines, InferenceServer.load_files, *arguments)

    async def close(self) -> None: ...


def expect_staged(_: Path, directory: str) -> None:
    """Raise ConfigurationError, on an engine's host, if it does not see what the trainer wrote."""
    if not (Path(directory) / MANIFEST).exists():
        raise ConfigurationError(
            f"--weight-transport disk: expected the staged weights in {directory}, which this node does not see; put "
            "--weight-staging-dir on a file system that all nodes share, or use --weight-transport object_store"
        )


async def _path(staged: StagedWeights, _: int, name: str) -> str:
    return str(Path(staged.directory) / name)


def _rank(side: RankSide) -> WeightSender:
    from miles_async.weights.staging import Staging

    return Staging(side.staging)


SPEC = TransportSpec(name="disk", driver=make_driver, rank=_rank, shared_files=True, delta=True, several_nodes=True)
