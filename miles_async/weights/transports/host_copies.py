"""``object_store``, and ``--weight-delta`` on any transport by files: each engine's host gets a copy of its own.

That happens while the engine generates; in the pause its server only loads files of its own host. A host that has
the version before, whose server holds that version too, gets what changed since, and the server loads the buckets in
which something did; any other gets everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from miles_async.seams import EngineErrors, EngineFleet, WeightSenders
from miles_async.types import Incarnation, StagedWeights
from miles_async.weights import host_copies
from miles_async.weights.files import bucket_file, delta_file
from miles_async.weights.transports.attempt import Attempt


class HostCopyTransport:
    """Implements WeightTransport."""

    def __init__(
        self, trainer: WeightSenders, fleet: EngineFleet, *, object_store: bool, keep: bool, flush_cache: bool
    ) -> None:
        """``object_store``: hosts get the bytes through it, else from a file system shared with the sending rank.

        ``keep``: copies stay, as the base of the next version; else they are gone once loaded.
        """
        self._trainer = trainer
        self._fleet = fleet
        self._object_store = object_store
        self._keep = keep
        self._flush_cache = flush_cache
        self._directories: dict[Incarnation, str] = {}  # engine → what its server has to load
        self.sent_fraction = 1.0

    async def prepare(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Copies on all hosts, one bucket after another: the object store never holds more than one."""
        attempt = Attempt(engines)
        changing = await self._that_have_base(staged, attempt)
        storing = [engine for engine in engines if engine not in changing]
        run = partial(self._on_hosts, attempt, _room(staged))
        for index, tensors in staged.buckets.items():
            if storing:
                source = await self._source(staged, index, bucket_file(index))
                await run(storing, host_copies.store_bucket, staged.version, index, source)
            if changing:
                assert staged.delta is not None
                changed = staged.delta.bucket_bytes[index] > 0
                source = await self._source(staged, index, delta_file(index)) if changed else None
                base = staged.delta.base_version
                await run(changing, host_copies.change_bucket, staged.version, index, source, base, tensors)
        self._directories = dict(await run(engines, host_copies.complete, staged.version))
        sent = len(storing) * staged.total_bytes + len(changing) * _delta_bytes(staged)
        self.sent_fraction = sent / max(1, len(engines) * staged.total_bytes)
        return attempt.errors

    async def deliver(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Each server loads from its own host."""
        directories = {engine: self._directories[engine] for engine in engines}
        errors = await self._fleet.load_files(directories, staged.version, self._flush_cache)
        if not self._keep:
            await self._fleet.on_host(engines, host_copies.discard)  # what fails here goes with the engine
        return errors

    async def close(self) -> None: ...

    async def _that_have_base(self, staged: StagedWeights, attempt: Attempt) -> Sequence[Incarnation]:
        """Whose host and whose server hold the version that the delta starts from."""
        if staged.delta is None:
            return ()
        serving = await attempt.each(self._fleet.weight_versions)
        held = await self._on_hosts(attempt, _room(staged), attempt.left, host_copies.held_version)
        base = staged.delta.base_version
        return [engine for engine, version in held.items() if version == base and serving[engine] == str(base)]

    async def _source(self, staged: StagedWeights, index: int, name: str) -> Any:
        """Of the bytes of a bucket's file: a path, or a reference to an object."""
        if not self._object_store:
            return str(Path(staged.directory) / name)
        [reference] = await self._trainer.call_sender("put_file", (staged.version, name), sender=index % staged.senders)
        return reference

    async def _on_hosts(
        self, attempt: Attempt, room: int, engines: Sequence[Incarnation], function: Callable[..., Any], *arguments: Any
    ) -> Mapping[Incarnation, Any]:
        return await attempt.each(lambda left: self._fleet.on_host(left, function, arguments, room=room), engines)


def _room(staged: StagedWeights) -> int:
    """Bytes on an engine's host: two versions, while the next one is put together."""
    return 2 * staged.total_bytes


def _delta_bytes(staged: StagedWeights) -> int:
    return sum(staged.delta.bucket_bytes.values()) if staged.delta else 0
