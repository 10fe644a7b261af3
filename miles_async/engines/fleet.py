"""The engines as the publisher sees them: every step of a publication, for those that it names, concurrently.

``supervisor.py`` keeps them alive. The states are those of ``registry.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import structlog

from miles_async.engines.engine_api import EngineApi
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.engines.supervisor import EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineError
from miles_async.protocols import EngineErrors, HeldWeights
from miles_async.types import CanaryScore, FleetMembers, TensorMeta

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")

_ABORT_DRAIN_SECONDS = 5.0  # for aborted requests to come back before the engine is paused all the same
_ABORT_POLL_SECONDS = 0.05
_PROBE_SECONDS = 10.0  # for what takes a healthy engine no time, and to clean up
_STEPS_TO_LOAD = 3  # deadlines of a step: it is all weights at once, and is not tried again
_UP = (EngineState.SERVING, EngineState.JOINING, EngineState.DRAINING)


class Fleet:
    """Implements ``protocols.EngineFleet``."""

    def __init__(
        self,
        registry: EngineRegistry,
        supervisor: EngineSupervisor,
        http: Http,
        traffic: Traffic,
        *,
        step_timeout: float = 60.0,
    ) -> None:
        """``step_timeout``: seconds for one call, or one bucket."""
        self._registry = registry
        self._supervisor = supervisor
        self._api = EngineApi(http)
        self._traffic = traffic
        self._step_timeout = step_timeout
        self._probe_timeout = min(step_timeout / 3, _PROBE_SECONDS)

    async def members(self) -> FleetMembers:
        """See ``protocols.EngineFleet``."""
        records = [r for r in self._registry.engines.values() if r.state is not EngineState.GONE]
        starting = (EngineState.STARTING, EngineState.FENCED)
        return FleetMembers(
            serving=tuple(r.engine_id for r in records if r.state is EngineState.SERVING),
            joining=tuple(r.engine_id for r in records if r.state is EngineState.JOINING),
            starting=tuple(r.engine_id for r in records if r.state in starting),
            ranks={r.engine_id: r.ranks for r in records},
            incarnations={r.engine_id: r.incarnation for r in records},
        )

    async def probe(self, engines: Sequence[str]) -> EngineErrors:
        return await self._each(engines, lambda url: self._api.probe(url, self._probe_timeout))

    async def weight_versions(self, engines: Sequence[str]) -> Mapping[str, str | Exception]:
        async def ask(_: EngineRecord, url: str) -> str:
            return (await self._api.model_info(url, self._probe_timeout)).weight_version

        return await self._ask(engines, ask)

    async def pause(self, engines: Sequence[str], mode: str) -> EngineErrors:
        """Stop requests at our side, then the engines; both until ``resume`` and ``admit``."""
        for record in self._records(engines):
            record.paused = True
        self._registry.notify()
        if mode == "abort":
            await self._drain_by_abort(engines)
        return await self._each(engines, lambda url: self._api.pause(url, mode, self._step_timeout))

    async def flush_cache(self, engines: Sequence[str]) -> EngineErrors:
        return await self._each(engines, lambda url: self._api.flush_cache(url, self._step_timeout))

    async def connect(
        self, engines: Sequence[str], group_name: str, address: str, port: int, world_size: int, backend: str
    ) -> EngineErrors:
        """Ranks 1.. in the order of ``engines``, each taking as many as its tensor-parallel size."""
        ranks = {record.engine_id: record.ranks for record in self._records(engines)}
        first_ranks = dict(zip(engines, accumulate((ranks.get(e, 1) for e in engines), initial=1), strict=False))

        async def join(record: EngineRecord, url: str) -> None:
            await self._api.join_group(
                url,
                group_name=group_name,
                address=address,
                port=port,
                first_rank=first_ranks[record.engine_id],
                world_size=world_size,
                backend=backend,
                timeout=self._step_timeout,
            )

        return await self._each_record(engines, join)

    async def disconnect(self, engines: Sequence[str], group_name: str) -> EngineErrors:
        return await self._each(engines, lambda url: self._api.leave_group(url, group_name, self._probe_timeout))

    async def begin_update(self, engines: Sequence[str]) -> EngineErrors:
        self._doubt(engines)
        return await self._each(engines, lambda url: self._api.begin_update(url, self._step_timeout))

    async def receive_bucket(
        self,
        engines: Sequence[str],
        group_name: str,
        tensors: Sequence[TensorMeta],
        version: int,
        flush_cache: bool,
    ) -> EngineErrors:
        return await self._each(
            engines,
            lambda url: self._api.receive_bucket(url, group_name, tensors, version, flush_cache, self._step_timeout),
        )

    async def receive_handles(
        self, engines: Sequence[str], handles: str, version: int, flush_cache: bool
    ) -> EngineErrors:
        async def receive(record: EngineRecord, url: str) -> None:
            await self._api.receive_handles(
                url, handles, record.ranks, version, flush_cache, timeout=self._step_timeout
            )

        return await self._each_record(engines, receive)

    async def end_update(self, engines: Sequence[str], *, abandon: bool = False) -> EngineErrors:
        timeout = self._probe_timeout if abandon else self._step_timeout
        return await self._each(engines, lambda url: self._api.end_update(url, timeout))

    async def load_files(self, directories: Mapping[str, str], version: int, flush_cache: bool) -> EngineErrors:
        """Needs no begin and end: SGLang's loader restores and post-processes by itself."""
        engines = tuple(directories)
        self._doubt(engines)

        async def load(record: EngineRecord, url: str) -> None:
            directory = directories[record.engine_id]
            timeout = _STEPS_TO_LOAD * self._step_timeout
            await self._api.load_files(url, directory, version, flush_cache, timeout)

        return await self._each_record(engines, load)

    async def on_host(
        self, engines: Sequence[str], function: Callable[..., Any], arguments: Sequence[Any] = (), *, room: int = 0
    ) -> Mapping[str, Any | Exception]:
        async def run(record: EngineRecord, _: str) -> Any:
            handle = self._supervisor.handle(record.engine_id)
            try:
                async with asyncio.timeout(self._step_timeout):
                    return await handle.on_host(function, room, *arguments)
            except TimeoutError:
                raise EngineError(f"its host did not {function.__name__} within {self._step_timeout:g} s") from None

        return await self._ask(engines, run)

    async def resume(self, engines: Sequence[str]) -> EngineErrors:
        """Let the engines go on. New requests still wait for ``admit`` if weights were received meanwhile."""

        async def go_on(record: EngineRecord, url: str) -> None:
            await self._api.resume(url, self._step_timeout)
            record.paused = False

        errors = await self._each_record(engines, go_on)
        self._registry.notify()
        return errors

    async def score(self, engines: Sequence[str], tokens: Sequence[int]) -> Mapping[str, CanaryScore | Exception]:
        """Not while paused: a paused SGLang answers no generation request."""
        return await self._ask(engines, lambda _, url: self._api.score(url, tokens, self._step_timeout))

    async def held_weights(self, engines: Sequence[str]) -> Mapping[str, HeldWeights | Exception]:
        return await self._ask(engines, lambda _, url: self._api.held_weights(url, self._step_timeout))

    async def admit(self, engines: Sequence[str], version: int) -> EngineErrors:
        """Requests may go out to these engines, under ``version``."""
        errors = await self._each_record(engines, partial(self._check_claim, version))
        present = [r for r in self._records(engines) if r.state in _UP and errors[r.engine_id] is None]
        for record in present:
            record.verified, record.version = True, version
        self._registry.notify()  # who served before goes on now; the router takes seconds to learn of others
        joining = [record.engine_id for record in present if record.state is EngineState.JOINING]
        return {**errors, **await self._each_record(joining, self._supervisor.make_routable)}

    async def fence(self, engines: Sequence[str], reason: str) -> None:
        """See ``protocols.EngineFleet``."""
        for record in self._records(engines):
            await self._supervisor.fence(record, reason)

    async def _check_claim(self, version: int, _: EngineRecord, url: str) -> None:
        claimed = (await self._api.model_info(url, self._step_timeout)).weight_version
        if claimed != str(version):
            raise EngineError(f"{url}: expected weight version {version}, found {claimed!r}")

    async def _drain_by_abort(self, engines: Sequence[str]) -> None:
        """End requests in flight before pausing: SGLang's own abort-pause looks again only after a second."""
        serving = {r.engine_id for r in self._registry.in_state(EngineState.SERVING)}
        if not serving <= set(engines):
            return  # others keep working, so the count of requests in flight says nothing about these
        try:
            async with asyncio.timeout(_ABORT_DRAIN_SECONDS):
                while self._traffic.in_flight:
                    await self._each(engines, lambda url: self._api.abort_all(url, self._step_timeout))
                    await asyncio.sleep(_ABORT_POLL_SECONDS)
        except TimeoutError:
            log.warning("requests did not end by abort", in_flight=self._traffic.in_flight)

    def _doubt(self, engines: Sequence[str]) -> None:
        """Their weights change: no answer counts until they are verified."""
        for record in self._records(engines):
            record.verified = False
        self._registry.notify()

    # ---------------------------------------------------------------------------------------- fan-out
    def _records(self, engines: Sequence[str]) -> list[EngineRecord]:
        """Of those that have not been scaled away meanwhile."""
        return [self._registry.engines[engine] for engine in engines if engine in self._registry.engines]

    async def _each(self, engines: Sequence[str], call: Callable[[str], Awaitable[None]]) -> EngineErrors:
        return await self._each_record(engines, lambda _, url: call(url))

    async def _each_record(
        self, engines: Sequence[str], call: Callable[[EngineRecord, str], Awaitable[None]]
    ) -> EngineErrors:
        return await self._ask(engines, call)

    async def _ask(
        self, engines: Sequence[str], call: Callable[[EngineRecord, str], Awaitable[Answer]]
    ) -> Mapping[str, Answer | Exception]:
        """``call`` on all concurrently; an EngineError (also: not up any more) is that engine's result."""
        results: dict[str, Answer | Exception] = {}

        async def one(engine: str) -> None:
            record = self._registry.engines.get(engine)
            try:
                if record is None or record.url is None:
                    raise EngineError(f"{engine} is {f'{record.state.value}: {record.reason}' if record else 'gone'}")
                results[engine] = await call(record, record.url)
            except EngineError as error:
                results[engine] = error

        async with asyncio.TaskGroup() as scope:
            for engine in engines:
                scope.create_task(one(engine))
        return {engine: results[engine] for engine in engines}
