"""The driver's half of transports that bring files to engines' hosts: ``object_store``, and any by files with
``--weight-delta``.

Hosts get their files while engines generate; in the pause a server only loads files from its host. Engines whose
directories are in one place share the files: one of them gets them, the others link them. One that has the version
before, and whose server holds that version too, gets what changed since; else it gets everything. A server that holds
the version before loads the buckets in which something changed. ``host_files.py`` is what runs on the hosts.

Where files stay on hosts, an engine that comes later (restarted, or updated later in a rolling publication) gets them
from engines that serve the version: by links on their node, else by ``Pass``. The second time for a version, the
trainer sends it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import structlog

from miles_async.runtime.tasks import gathered
from miles_async.seams import EngineErrors, EngineFleet, InferenceServer, per_engine
from miles_async.types import Incarnation, StagedWeights
from miles_async.weights.files import bucket_file, delta_file
from miles_async.weights.transports import host_files
from miles_async.weights.transports.host_files import CHANGED, Source
from miles_async.weights.transports.spec import DriverSide, Half

log = structlog.get_logger(__name__)

Ts = TypeVarTuple("Ts")
Result = TypeVar("Result")

FindSource = Callable[[StagedWeights, int, str], Awaitable[Source]]
"""(staged weights, index of a bucket, name of a file of that bucket) → where hosts get its bytes from."""

Pass = Callable[[Path, int, str], list[Source]]
"""Runs on the host of an engine: (its directory, version, name of a file) → where other hosts get the bytes from, in a
list, so that no reference is resolved on the way.
"""


class LocalFilesTransport:
    """Implements WeightTransport."""

    def __init__(self, side: DriverSide[Half], source: FindSource, pass_on: Pass | None = None) -> None:
        """With ``side.delta`` the files stay on the hosts, as the base of the next version; else they are removed once
        loaded. ``pass_on``: None if hosts always get the bytes from ``source``.
        """
        self._fleet = side.fleet
        self._keep = side.delta
        self._source = source
        self._pass_on = pass_on
        self._taken: dict[str, int] = {}  # engine → version that it got from other engines last
        self._directories: dict[Incarnation, str] = {}  # engine → what its server has to load
        self.sent_fraction = 1.0

    async def prepare(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Bring files to all hosts: to one engine of each place, from which the others there link them.

        If that one fails or is lost meanwhile, the next of its place gets everything.
        """
        hosts = _Hosts(self._fleet, staged, engines)
        places = await hosts.run(engines, host_files.find_place)
        with_base = set(await self._that_have_base(staged, hosts))
        holders = await self._holders(staged, engines)
        self._directories = dict(await self._link_to_holders(staged, hosts, places, holders, with_base))
        sent = 0
        while waiting := [engine for engine in hosts.left if engine not in self._directories]:
            groups: defaultdict[object, list[Incarnation]] = defaultdict(list)
            for engine in sorted(waiting, key=lambda engine: engine not in with_base):
                groups[places[engine].parent].append(engine)
            first = [group[0] for group in groups.values()]
            changing = [engine for engine in first if engine in with_base]
            storing = [engine for engine in first if engine not in with_base]
            passing = [*holders] if self._pass_on and self._may_take(staged, storing) == storing else []
            await self._fill(staged, hosts, storing, changing, passing)
            sent += len(storing) * staged.total_bytes
            sent += len(changing) * sum(staged.delta.bucket_bytes.values()) if staged.delta else 0
            self._directories |= await hosts.run(first, host_files.complete, staged.version)
            linking = []
            for source, *others in groups.values():
                if source in self._directories:
                    current = with_base.intersection(others)
                    neighbour = places[source].name
                    linking.append(hosts.link(neighbour, [*current], _files(staged, changes=True)))
                    linking.append(hosts.link(neighbour, [*{*others} - current], _files(staged, changes=False)))
                else:
                    with_base.difference_update(others)
            for linked in await gathered(*linking):
                self._directories |= linked
        self.sent_fraction = sent / max(1, len(engines) * staged.total_bytes)
        return hosts.errors

    async def deliver(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Make each server load from its own host."""
        arguments = (per_engine(self._directories), staged.version)
        errors = await self._fleet.call(engines, InferenceServer.load_files, *arguments)
        if not self._keep:
            await self._fleet.on_host(engines, host_files.discard)  # missed files are removed with the engine
        return errors

    async def close(self) -> None: ...

    async def _holders(
        self, staged: StagedWeights, engines: Sequence[Incarnation]
    ) -> Mapping[Incarnation, host_files.Place]:
        """Engines that serve the version and whose hosts have its files, and where."""
        serving = (await self._fleet.members()).serving if self._keep else ()
        others = [engine for engine in serving if engine not in engines]
        found = await self._fleet.on_host(others, host_files.find_copy, staged.version) if others else {}
        return {engine: place for engine, place in found.items() if isinstance(place, host_files.Place)}

    def _may_take(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> Sequence[Incarnation]:
        """Engines that have not got this version from others before; a second time would not help."""
        return [engine for engine in engines if self._taken.get(engine.engine) != staged.version]

    async def _link_to_holders(
        self,
        staged: StagedWeights,
        hosts: _Hosts,
        places: Mapping[Incarnation, host_files.Place],
        holders: Mapping[Incarnation, host_files.Place],
        with_base: Collection[Incarnation],
    ) -> Mapping[Incarnation, str]:
        """Link the files of holders on the same node. Returns what these engines have to load."""
        names = {place.parent: place.name for place in holders.values()}
        linking = []
        for engine in self._may_take(staged, hosts.left):
            if (name := names.get(places[engine].parent)) is not None:
                self._taken[engine.engine] = staged.version
                linking.append(hosts.link(name, [engine], _files(staged, changes=engine in with_base)))
        return {engine: directory for linked in await gathered(*linking) for engine, directory in linked.items()}

    async def _fill(
        self,
        staged: StagedWeights,
        hosts: _Hosts,
        storing: Sequence[Incarnation],
        changing: Sequence[Incarnation],
        passing: list[Incarnation],
    ) -> None:
        """Write the files, one bucket after another: an object store never holds more than one.

        ``passing``: engines that pass on whole files; the sending rank does when none is left.
        """
        self._taken |= dict.fromkeys((engine.engine for engine in storing if passing), staged.version)
        for index, tensors in staged.buckets.items():
            if storing:
                source = await self._find_whole(staged, index, passing)
                await hosts.run(storing, host_files.store_bucket, staged.version, index, source)
            if changing:
                assert staged.delta is not None
                changed = staged.delta.bucket_bytes[index] > 0
                delta = await self._source(staged, index, delta_file(index)) if changed else None
                base = staged.delta.base_version
                await hosts.run(changing, host_files.change_bucket, staged.version, index, delta, base, tensors)

    async def _find_whole(self, staged: StagedWeights, index: int, passing: list[Incarnation]) -> Source:
        """Return the source of a bucket's file. Engines that fail to pass it on are removed from ``passing``."""
        while passing:
            assert self._pass_on is not None
            answers = await self._fleet.on_host(passing[:1], self._pass_on, staged.version, bucket_file(index))
            if not isinstance(answer := answers[passing[0]], Exception):
                return answer[0]
            log.warning("engine did not pass on weights", engine=str(passing.pop(0)), error=str(answer))
        return await self._source(staged, index, bucket_file(index))

    async def _that_have_base(self, staged: StagedWeights, hosts: _Hosts) -> Sequence[Incarnation]:
        """Engines whose host and whose server hold the version that the delta starts from."""
        if staged.delta is None:
            return ()
        serving = hosts.keep(await self._fleet.call(hosts.left, InferenceServer.weight_version))
        held = await hosts.run(hosts.left, host_files.held_version)
        base = staged.delta.base_version
        return [engine for engine, version in held.items() if version == base and serving[engine] == str(base)]


class _Hosts:
    """The hosts of engines that get files; a host that fails is dropped."""

    def __init__(self, fleet: EngineFleet, staged: StagedWeights, engines: Sequence[Incarnation]) -> None:
        self.errors: dict[Incarnation, Exception | None] = dict.fromkeys(engines)
        self._fleet = fleet
        self._version = staged.version
        self._room = 2 * staged.total_bytes  # two versions, while the next one is put together

    @property
    def left(self) -> list[Incarnation]:
        return [engine for engine, error in self.errors.items() if error is None]

    def keep(self, results: Mapping[Incarnation, Result | Exception]) -> dict[Incarnation, Result]:
        """Remember failures; return the answers of the others."""
        self.errors |= {engine: found for engine, found in results.items() if isinstance(found, Exception)}
        return {engine: found for engine, found in results.items() if not isinstance(found, Exception)}

    async def run(
        self, engines: Sequence[Incarnation], function: Callable[[Path, *Ts], Result], *arguments: *Ts
    ) -> Mapping[Incarnation, Result]:
        """Run ``function(directory, *arguments)`` on the hosts of ``engines`` that have not failed."""
        left = [engine for engine in engines if self.errors[engine] is None]
        return self.keep(await self._fleet.on_host(left, function, *arguments, room=self._room) if left else {})

    async def link(
        self, neighbour: str, engines: Sequence[Incarnation], files: Sequence[str]
    ) -> Mapping[Incarnation, str]:
        """Link engines to the files that one on their node has. Engines that found them gone are omitted."""
        linked = await self.run(engines, host_files.link_version, self._version, neighbour, files)
        return {engine: directory for engine, directory in linked.items() if directory is not None}


def _files(staged: StagedWeights, *, changes: bool) -> list[str]:
    """Files of a version on a host. ``changes``: include the links to changed buckets."""
    files = [bucket_file(index) for index in staged.buckets]
    if changes and staged.delta is not None:
        files += [f"{CHANGED}/{bucket_file(index)}" for index, size in staged.delta.bucket_bytes.items() if size]
    return files
