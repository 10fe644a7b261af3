"""The engines as the publisher sees them: each step of a publication, on the named engines concurrently.

Engines are named by their incarnations, and a step counts only for those that are the same when all have answered: an
engine that is restarted in the middle of an update has received nothing of it.

``supervisor.py`` keeps engines alive. The states are those of ``registry.py``.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import structlog

from miles_async.arguments.weights import PauseMode
from miles_async.engines.kind import InferenceServer
from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.engines.stream_deadline import StreamDeadline
from miles_async.engines.supervisor import EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineError, EngineTimeoutError
from miles_async.runtime.loop_turns import LoopTurns
from miles_async.seams import EngineErrors
from miles_async.types import CanaryScore, FleetMembers, GroupBackend, HeldWeights, Incarnation, TensorMeta, TensorShare

log = structlog.get_logger(__name__)

Ts = TypeVarTuple("Ts")
Answer = TypeVar("Answer")

_ABORT_DRAIN_SECONDS = 5.0  # for aborted requests to come back before the engine is paused all the same
_ABORT_POLL_SECONDS = 0.05
_PROBE_SECONDS = 10.0  # for calls that take a healthy engine no time, and for cleaning up
_CALLS_AT_ONCE = 8  # begun per turn of the event loop, 0.2 ms each
_STEPS_TO_STREAM = 6  # deadlines of a step for receive_stream at most: all of a publication
_STEPS_TO_LOAD = 3  # deadlines of a step for load_files: all weights at once, and no second try


class Fleet:
    """Implements ``seams.EngineFleet``."""

    def __init__(
        self,
        registry: EngineRegistry,
        supervisor: EngineSupervisor,
        server: InferenceServer,
        traffic: Traffic,
        *,
        step_timeout: float = 60.0,
    ) -> None:
        """``step_timeout``: seconds for one call or one bucket."""
        self._registry = registry
        self._supervisor = supervisor
        self._server = server
        self._traffic = traffic
        self._step_timeout = step_timeout
        self._probe_timeout = min(step_timeout / 3, _PROBE_SECONDS)
        self._turns = LoopTurns(_CALLS_AT_ONCE)
        self._streams: dict[tuple[str, ...], StreamDeadline] = {}  # being received, by process groups

    async def members(self) -> FleetMembers:
        """See ``seams.EngineFleet``."""
        records = [r for r in self._registry.engines.values() if r.state is not EngineState.GONE]
        starting = (EngineState.STARTING, EngineState.FENCED)
        return FleetMembers(
            serving=tuple(r.current for r in records if r.state is EngineState.SERVING),
            joining=tuple(r.current for r in records if r.state is EngineState.JOINING),
            starting=tuple(r.engine_id for r in records if r.state in starting),
            ranks={r.engine_id: r.ranks for r in records},
            bucketwise=frozenset(r.engine_id for r in records if not r.streams),
        )

    async def probe(self, engines: Sequence[Incarnation]) -> EngineErrors:
        async def ask(record: EngineRecord, url: str) -> None:
            record.tokens_in_flight = await self._server.probe(url, self._probe_timeout)

        return await self._each_record(engines, ask)

    async def weight_versions(self, engines: Sequence[Incarnation]) -> Mapping[Incarnation, str | Exception]:
        async def ask(_: EngineRecord, url: str) -> str:
            return await self._server.weight_version(url, self._probe_timeout)

        return await self._ask(engines, ask)

    async def pause(self, engines: Sequence[Incarnation], mode: PauseMode) -> EngineErrors:
        """Hold requests back on the client, then pause the engines; both until ``resume`` and ``admit``."""
        for record in self._records(engines):
            record.paused = True
        self._registry.notify()
        if mode == "abort":
            await self._drain_by_abort(engines)
        return await self._each(engines, lambda url: self._server.pause(url, mode, self._step_timeout))

    async def flush_cache(self, engines: Sequence[Incarnation]) -> EngineErrors:
        return await self._each(engines, lambda url: self._server.flush_cache(url, self._step_timeout))

    async def release_memory(self, engines: Sequence[Incarnation]) -> EngineErrors:
        self._doubt(engines)
        return await self._each(engines, lambda url: self._server.release_memory(url, self._step_timeout))

    async def retake_memory(self, engines: Sequence[Incarnation]) -> EngineErrors:
        return await self._each(engines, lambda url: self._server.retake_memory(url, self._step_timeout))

    async def connect(
        self,
        engines: Sequence[Incarnation],
        group_name: str,
        address: str,
        port: int,
        world_size: int,
        backend: GroupBackend,
    ) -> EngineErrors:
        """Assign ranks from 1 on in the order of ``engines``, as many to each as its tensor-parallel size."""
        ranks = {record.current: record.ranks for record in self._records(engines)}
        first_ranks = dict(zip(engines, accumulate((ranks.get(e, 1) for e in engines), initial=1), strict=False))

        async def join(record: EngineRecord, url: str) -> None:
            await self._server.join_group(
                url,
                group_name=group_name,
                address=address,
                port=port,
                first_rank=first_ranks[record.current],
                world_size=world_size,
                backend=backend,
                timeout=self._step_timeout,
            )

        return await self._each_record(engines, join)

    async def disconnect(self, engines: Sequence[Incarnation], group_name: str) -> EngineErrors:
        return await self._each(engines, lambda url: self._server.leave_group(url, group_name, self._probe_timeout))

    async def receive_stream(
        self, engines: Sequence[Incarnation], group_names: Sequence[str], version: int, flush_cache: bool
    ) -> EngineErrors:
        self._doubt(engines)
        names = tuple(group_names)
        limits = self._streams[names] = StreamDeadline(_STEPS_TO_STREAM * self._step_timeout)

        async def receive(url: str) -> None:
            async with limits.of(url):
                await self._server.receive_stream(url, names, version, flush_cache, limits.longest)

        try:
            return await self._each(engines, receive)
        finally:
            del self._streams[names]

    async def stream_sent(self, group_names: Sequence[str], *, broken: bool) -> None:
        """Grant less time after an error: members of a process group notice it at the same time."""
        if limits := self._streams.get(tuple(group_names)):
            limits.expire_in(self._probe_timeout if broken else self._step_timeout)

    async def begin_update(self, engines: Sequence[Incarnation]) -> EngineErrors:
        self._doubt(engines)
        return await self._each(engines, lambda url: self._server.begin_update(url, self._step_timeout))

    async def receive_bucket(
        self,
        engines: Sequence[Incarnation],
        group_name: str,
        tensors: Sequence[TensorMeta],
        version: int,
        flush_cache: bool,
    ) -> EngineErrors:
        return await self._each(
            engines,
            lambda url: self._server.receive_bucket(url, group_name, tensors, version, flush_cache, self._step_timeout),
        )

    async def receive_handles(
        self, engines: Sequence[Incarnation], handles: str, version: int, flush_cache: bool
    ) -> EngineErrors:
        async def receive(record: EngineRecord, url: str) -> None:
            await self._server.receive_handles(url, handles, record.ranks, version, flush_cache, self._step_timeout)

        return await self._each_record(engines, receive)

    async def end_update(self, engines: Sequence[Incarnation], *, abandon: bool = False) -> EngineErrors:
        timeout = self._probe_timeout if abandon else self._step_timeout
        return await self._each(engines, lambda url: self._server.end_update(url, timeout))

    async def load_files(self, directories: Mapping[Incarnation, str], version: int, flush_cache: bool) -> EngineErrors:
        engines = tuple(directories)
        self._doubt(engines)

        async def load(record: EngineRecord, url: str) -> None:
            directory = directories[record.current]
            timeout = _STEPS_TO_LOAD * self._step_timeout
            await self._server.load_files(url, directory, version, flush_cache, timeout)

        return await self._each_record(engines, load)

    async def on_host(
        self,
        engines: Sequence[Incarnation],
        function: Callable[[Path, *Ts], Answer],
        *arguments: *Ts,
        room: int = 0,
    ) -> Mapping[Incarnation, Answer | Exception]:
        async def run(record: EngineRecord, _: str) -> Answer:
            handle = self._supervisor.handle(record.engine_id)
            try:
                async with asyncio.timeout(self._step_timeout):
                    answer: Answer = await handle.on_host(function, room, *arguments)
                    return answer
            except TimeoutError:
                raise EngineTimeoutError(
                    f"its host did not {function.__name__} within {self._step_timeout:g} s"
                ) from None

        return await self._ask(engines, run)

    async def resume(self, engines: Sequence[Incarnation]) -> EngineErrors:
        """Resume the engines. New requests still wait for ``admit`` if weights were received in the pause."""
        errors = await self._each(engines, lambda url: self._server.resume(url, self._step_timeout))
        for record in self._records(engine for engine, error in errors.items() if error is None):
            record.paused = False
        self._registry.notify()
        return errors

    async def score(
        self, engines: Sequence[Incarnation], tokens: Sequence[int]
    ) -> Mapping[Incarnation, CanaryScore | Exception]:
        return await self._ask(engines, lambda _, url: self._server.score(url, tokens, self._step_timeout))

    async def held_weights(
        self, engines: Sequence[Incarnation], share: TensorShare
    ) -> Mapping[Incarnation, HeldWeights | Exception]:
        """Read one of the reports that are the same: its engines share the object."""
        found = await self._ask(engines, lambda _, url: self._server.report_weights(url, share, self._step_timeout))
        results: dict[Incarnation, HeldWeights | Exception] = {}
        alike: defaultdict[str, list[Incarnation]] = defaultdict(list)
        for engine, report in found.items():
            if isinstance(report, Exception):
                results[engine] = report
            else:
                alike[report].append(engine)
        async with asyncio.TaskGroup() as scope:
            reading = [scope.create_task(self._read_report(report, reporters)) for report, reporters in alike.items()]
        for read in reading:
            results |= read.result()
        return results

    async def admit(self, engines: Sequence[Incarnation], version: int) -> EngineErrors:
        """Route requests to these engines, under ``version``."""
        errors = await self._each_record(engines, partial(self._check_claim, version))
        present = self._records(engine for engine, error in errors.items() if error is None)
        for record in present:
            record.verified, record.version = True, version
        self._registry.notify()  # engines that served before go on now; the router takes seconds to learn of others
        joining = [record.current for record in present if record.state is EngineState.JOINING]
        return {**errors, **await self._each_record(joining, self._supervisor.routing.admit)}

    async def fence(self, engines: Sequence[Incarnation], reason: str) -> None:
        """See ``seams.EngineFleet``."""
        for engine in engines:
            for record in self._records([engine]):
                await self._supervisor.routing.fence(record, reason)

    async def _read_report(
        self, report: str, engines: Sequence[Incarnation]
    ) -> Mapping[Incarnation, HeldWeights | Exception]:
        """Read the report that ``engines`` share from the first that answers."""
        results: dict[Incarnation, HeldWeights | Exception] = {}
        for number, engine in enumerate(engines):
            asked = await self._ask([engine], lambda _, url: self._server.held_weights(url, report, self._step_timeout))
            results |= asked
            if not isinstance(held := asked[engine], Exception):
                return results | dict.fromkeys(engines[number:], held)
        return results

    async def _check_claim(self, version: int, _: EngineRecord, url: str) -> None:
        claimed = await self._server.weight_version(url, self._step_timeout)
        if claimed != str(version):
            raise EngineError(f"{url}: expected weight version {version}, found {claimed!r}")

    async def _drain_by_abort(self, engines: Sequence[Incarnation]) -> None:
        """End requests in flight before pausing: a server's own pause may notice their end a second late."""
        serving = {record.current for record in self._registry.in_state(EngineState.SERVING)}
        if not serving <= set(engines):
            return  # others keep working, so the number of requests in flight says nothing about these
        try:
            async with asyncio.timeout(_ABORT_DRAIN_SECONDS):
                while self._traffic.in_flight:
                    await self._each(engines, lambda url: self._server.abort_all(url, self._step_timeout))
                    await asyncio.sleep(_ABORT_POLL_SECONDS)
        except TimeoutError:
            log.warning("requests did not end by abort", in_flight=self._traffic.in_flight)

    def _doubt(self, engines: Sequence[Incarnation]) -> None:
        """Mark weights as unverified: they are about to change, and no answer counts until they are verified."""
        for record in self._records(engines):
            record.verified = False
        self._registry.notify()

    # ---------------------------------------------------------------------------------------- fan-out
    def _records(self, engines: Iterable[Incarnation]) -> list[EngineRecord]:
        """Records of the engines that are up and have been neither restarted nor removed."""
        return [self._registry.engines[engine.engine] for engine in engines if self._end_of(engine) is None]

    def _end_of(self, engine: Incarnation) -> EngineError | None:
        """Why that start of the engine has ended; None while it is up."""
        record = self._registry.engines.get(engine.engine)
        if record is None:
            return EngineError(f"{engine} is gone")
        if record.incarnation != engine.number or record.url is None:
            return EngineError(f"{engine} was lost and is {record.state.value}: {record.reason}")
        return None

    async def _each(self, engines: Sequence[Incarnation], call: Callable[[str], Awaitable[None]]) -> EngineErrors:
        return await self._each_record(engines, lambda _, url: call(url))

    async def _each_record(
        self, engines: Sequence[Incarnation], call: Callable[[EngineRecord, str], Awaitable[None]]
    ) -> EngineErrors:
        return await self._ask(engines, call)

    async def _ask(
        self, engines: Sequence[Incarnation], call: Callable[[EngineRecord, str], Awaitable[Answer]]
    ) -> Mapping[Incarnation, Answer | Exception]:
        """Make ``call`` on all engines concurrently. An engine's result is what it returns, the EngineError that it
        raises, or the engine's loss before all others have answered.
        """
        results: dict[Incarnation, Answer | Exception] = {}

        async def one(engine: Incarnation) -> None:
            await self._turns.turn()
            try:
                if end := self._end_of(engine):
                    raise end
                record = self._registry.engines[engine.engine]
                assert record.url is not None
                results[engine] = await call(record, record.url)
            except EngineError as error:
                results[engine] = error

        async with asyncio.TaskGroup() as scope:
            for engine in engines:
                scope.create_task(one(engine))
        return {engine: self._end_of(engine) or results[engine] for engine in engines}
