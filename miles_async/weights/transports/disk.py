"""``disk``: engines load the staged files themselves, from a file system that the sending rank and they share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_async.errors import ConfigurationError
from miles_async.seams import EngineErrors, EngineFleet
from miles_async.types import Incarnation, StagedWeights
from miles_async.weights.files import MANIFEST
from miles_async.weights.transports.attempt import Attempt


class DiskTransport:
    """Implements WeightTransport."""

    sent_fraction = 1.0

    def __init__(self, fleet: EngineFleet, *, flush_cache: bool) -> None:
        """``flush_cache``: once loaded; an engine that keeps requests refuses to."""
        self._fleet = fleet
        self._flush_cache = flush_cache

    async def prepare(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Whether their hosts see the files: SGLang would look for a directory that is absent on a model hub."""
        attempt = Attempt(engines)
        await attempt.each(lambda left: self._fleet.on_host(left, expect_staged, (staged.directory,)))
        return attempt.errors

    async def deliver(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Each engine reads all files."""
        return await self._fleet.load_files(dict.fromkeys(engines, staged.directory), staged.version, self._flush_cache)

    async def close(self) -> None: ...


def expect_staged(_: Path, directory: str) -> None:
    """On an engine's host: raises ConfigurationError if it does not see what the trainer wrote."""
    if not (Path(directory) / MANIFEST).exists():
        raise ConfigurationError(
            f"--weight-transport disk: expected the staged weights in {directory}, which this node does not see; put "
            "--weight-staging-dir on a file system that all nodes share, or use --weight-transport object_store"
        )
