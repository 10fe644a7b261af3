"""The engines as the publisher sees them (``protocols.EngineFleet``), and what keeps them alive.

``start`` brings all of them up. ``supervise`` then follows each through its life: it waits until the engine
dies, becomes unreachable or is fenced, takes it out of the router, restarts it, and leaves it ``joining``:
the publisher brings it to the current weights and ``admit``s it. The states are those of ``registry.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import structlog

from miles_async.engines.engine_api import EngineApi
from miles_async.engines.http import Http
from miles_async.engines.placement import LaunchServer, ServerHandle
from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.engines.router import Router
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineError, EngineStartError, first_error
from miles_async.protocols import EngineErrors, HeldWeights
from miles_async.types import CanaryScore, FleetMembers, TensorMeta

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")

_CALL_SECONDS = 60.0
_ABORT_DRAIN_SECONDS = 5.0  # for aborted requests to come back before the engine is paused all the same
_ABORT_POLL_SECONDS = 0.05
_PROBE_INTERVAL = 5.0
_PROBE_SECONDS = 10.0
_PROBE_FAILURES = 6  # in a row, before a live process counts as unreachable


class Fleet:
    """Implements ``protocols.EngineFleet``."""

    def __init__(
        self,
        registry: EngineRegistry,
        router: Router,
        http: Http,
        traffic: Traffic,
        launch: LaunchServer,
        *,
        num_engines: int,
        ranks_per_engine: int = 1,
        max_restarts: int = 3,
        bucket_timeout: float = 300.0,
    ) -> None:
        """``bucket_timeout``: seconds for one bucket, or for joining a process group."""
        self._registry = registry
        self._router = router
        self._api = EngineApi(http)
        self._traffic = traffic
        self._launch = launch
        self._max_restarts = max_restarts
        self._bucket_timeout = bucket_timeout
        self._handles: dict[str, ServerHandle] = {}
        self._index: dict[str, int] = {}
        for index in range(num_engines):
            record = EngineRecord(engine_id=f"engine-{index}", ranks=ranks_per_engine)
            registry.engines[record.engine_id] = record
            self._index[record.engine_id] = index

    # ------------------------------------------------------------------------------------------- life
    async def start(self) -> None:
        """All engines up and ``joining``. Raises the first EngineStartError, having stopped the others."""
        try:
            async with asyncio.TaskGroup() as scope:
                for record in self._registry.engines.values():
                    scope.create_task(self._start_engine(record))
        except BaseExceptionGroup as group:
            await self.stop()
            raise first_error(group) from None
        except BaseException:
            await self.stop()
            raise

    async def supervise(self) -> None:
        """Keeps engines and router alive until cancelled. Raises EngineError, with last log lines, when it
        can't.
        """
        try:
            async with asyncio.TaskGroup() as scope:
                scope.create_task(self._router.supervise())
                for record in self._registry.engines.values():
                    scope.create_task(self._follow(record))
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def stop(self) -> None:
        """End all servers. Never raises for a server that is already gone."""
        async with asyncio.TaskGroup() as scope:
            for handle in self._handles.values():
                scope.create_task(handle.stop())
        for record in self._registry.engines.values():
            _forget(record, EngineState.GONE)
        self._registry.notify()

    async def wait_for_joining(self) -> None:
        """Until at least one engine waits for weights."""
        await self._registry.wait_until(lambda: bool(self._registry.in_state(EngineState.JOINING)))

    async def _start_engine(self, record: EngineRecord) -> None:
        handle = self._launch(self._index[record.engine_id], record.incarnation)
        self._handles[record.engine_id] = handle
        record.state = EngineState.STARTING
        self._registry.notify()
        record.url = await handle.start()
        record.state = EngineState.JOINING
        self._registry.notify()
        log.info("engine is up", engine=record.engine_id, url=record.url)

    async def _follow(self, record: EngineRecord) -> None:
        """One engine: wait for its end, restart it, again and again, at most ``max_restarts`` times."""
        reason = await self._until_lost(record)
        while True:
            await self._take_out(record, reason)
            await self._handles[record.engine_id].stop()
            if record.restarts >= self._max_restarts:
                self._give_up(record)
                return
            record.restarts += 1
            log.warning("restarting engine", engine=record.engine_id, restart=record.restarts, reason=record.reason)
            try:
                await self._start_engine(record)
            except EngineStartError as error:
                reason = str(error)
            else:
                reason = await self._until_lost(record)

    def _give_up(self, record: EngineRecord) -> None:
        record.state = EngineState.GONE
        self._registry.notify()
        log.error("engine given up", engine=record.engine_id, restarts=record.restarts, reason=record.reason)
        if len(self._registry.in_state(EngineState.GONE)) == len(self._registry.engines):
            raise EngineError(
                f"no engine is left; the last, {record.engine_id}, was restarted {record.restarts} times "
                f"(--engine-max-restarts): {record.reason}"
            )

    async def _until_lost(self, record: EngineRecord) -> str:
        """Why the engine has to be restarted, as soon as it has to."""
        incarnation = record.incarnation

        async def fenced() -> str:
            await self._registry.wait_until(lambda: record.incarnation != incarnation)
            return record.reason

        return await _first_of(self._handles[record.engine_id].wait_exit(), self._until_unreachable(record), fenced())

    async def _until_unreachable(self, record: EngineRecord) -> str:
        """For machines that vanish without closing connections; SGLang's own watchdog ends a stuck
        scheduler.
        """
        failures, url = 0, record.url
        assert url is not None
        while failures < _PROBE_FAILURES:
            await asyncio.sleep(_PROBE_INTERVAL)
            try:
                await self._api.model_info(url, _PROBE_SECONDS)
                failures = 0
            except EngineError as error:
                failures += 1
                log.warning("engine does not answer", engine=record.engine_id, failures=failures, error=str(error))
        return f"did not answer {failures} times in a row"

    async def _take_out(self, record: EngineRecord, reason: str) -> None:
        """Void everything known of this engine; no-op if ``fence`` did it already."""
        if record.state is EngineState.FENCED:
            return
        url = record.url
        record.reason = reason
        _forget(record, EngineState.FENCED)
        self._registry.notify()
        log.warning("engine fenced", engine=record.engine_id, reason=reason)
        if url is None:
            return
        try:
            await self._router.remove(url)
        except EngineError as error:  # a router that is down knows only who serves when it is back
            log.warning("router could not remove engine", engine=record.engine_id, error=str(error))

    # ------------------------------------------------------------------------------------ publication
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

    async def weight_versions(self, engines: Sequence[str]) -> Mapping[str, str | Exception]:
        """Also tells who does not answer."""

        async def ask(_: EngineRecord, url: str) -> str:
            return (await self._api.model_info(url, _PROBE_SECONDS)).weight_version

        return await self._ask(engines, ask)

    async def pause(self, engines: Sequence[str], mode: str) -> EngineErrors:
        """Stop requests at our side, then the engines; both until ``resume`` and ``admit``."""
        for record in self._records(engines):
            record.paused = True
        self._registry.notify()
        if mode == "abort":
            await self._drain_by_abort(engines)
        return await self._each(engines, lambda url: self._api.pause(url, mode, _CALL_SECONDS))

    async def flush_cache(self, engines: Sequence[str]) -> EngineErrors:
        return await self._each(engines, lambda url: self._api.flush_cache(url, _CALL_SECONDS))

    async def connect(
        self, engines: Sequence[str], group_name: str, address: str, port: int, world_size: int, backend: str
    ) -> EngineErrors:
        """Ranks 1.. in the order of ``engines``, each taking as many as its tensor-parallel size."""
        sizes = [record.ranks for record in self._records(engines)]
        first_ranks = dict(zip(engines, accumulate(sizes, initial=1), strict=False))
        assert world_size == 1 + sum(sizes), f"{world_size=} for engines of {sizes} ranks"

        async def join(record: EngineRecord, url: str) -> None:
            await self._api.join_group(
                url,
                group_name=group_name,
                address=address,
                port=port,
                first_rank=first_ranks[record.engine_id],
                world_size=world_size,
                backend=backend,
                timeout=self._bucket_timeout,
            )

        return await self._each_record(engines, join)

    async def disconnect(self, engines: Sequence[str], group_name: str) -> EngineErrors:
        return await self._each(engines, lambda url: self._api.leave_group(url, group_name, _CALL_SECONDS))

    async def begin_update(self, engines: Sequence[str]) -> EngineErrors:
        self._doubt(engines)
        return await self._each(engines, lambda url: self._api.begin_update(url, _CALL_SECONDS))

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
            lambda url: self._api.receive_bucket(url, group_name, tensors, version, flush_cache, self._bucket_timeout),
        )

    async def receive_handles(
        self, engines: Sequence[str], handles: str, version: int, flush_cache: bool
    ) -> EngineErrors:
        async def receive(record: EngineRecord, url: str) -> None:
            await self._api.receive_handles(
                url, handles, record.ranks, version, flush_cache, timeout=self._bucket_timeout
            )

        return await self._each_record(engines, receive)

    async def end_update(self, engines: Sequence[str]) -> EngineErrors:
        return await self._each(engines, lambda url: self._api.end_update(url, _CALL_SECONDS))

    async def load_files(self, directories: Mapping[str, str], version: int, flush_cache: bool) -> EngineErrors:
        """Needs no begin and end: SGLang's loader restores and post-processes by itself."""
        engines = tuple(directories)
        self._doubt(engines)

        async def load(record: EngineRecord, url: str) -> None:
            directory = directories[record.engine_id]
            await self._api.load_files(url, directory, version, flush_cache, self._bucket_timeout)

        return await self._each_record(engines, load)

    async def on_host(
        self, engines: Sequence[str], function: Callable[..., Any], arguments: Sequence[Any] = (), *, room: int = 0
    ) -> Mapping[str, Any | Exception]:
        async def run(record: EngineRecord, _: str) -> Any:
            handle = self._handles[record.engine_id]
            try:
                async with asyncio.timeout(self._bucket_timeout):
                    return await handle.on_host(function, room, *arguments)
            except TimeoutError:
                raise EngineError(f"its host did not {function.__name__} within {self._bucket_timeout:g} s") from None

        return await self._ask(engines, run)

    async def resume(self, engines: Sequence[str]) -> EngineErrors:
        """Let the engines go on. New requests still wait for ``admit`` if weights were received meanwhile."""

        async def go_on(record: EngineRecord, url: str) -> None:
            await self._api.resume(url, _CALL_SECONDS)
            record.paused = False

        errors = await self._each_record(engines, go_on)
        self._registry.notify()
        return errors

    async def score(self, engines: Sequence[str], tokens: Sequence[int]) -> Mapping[str, CanaryScore | Exception]:
        """Not while paused: a paused SGLang answers no generation request."""
        return await self._ask(engines, lambda _, url: self._api.score(url, tokens, _CALL_SECONDS))

    async def held_weights(self, engines: Sequence[str]) -> Mapping[str, HeldWeights | Exception]:
        return await self._ask(engines, lambda _, url: self._api.held_weights(url, self._bucket_timeout))

    async def admit(self, engines: Sequence[str], version: int) -> None:
        """Requests may go out to these engines, under ``version``; those that claim another are fenced."""
        await self._fence_disagreeing(engines, version)
        present = [r for r in self._records(engines) if r.state in (EngineState.SERVING, EngineState.JOINING)]
        if not present:
            return
        for record in present:
            record.verified, record.version = True, version
        self._registry.notify()  # who served before goes on now; the router takes seconds to learn of others
        joining = [record.engine_id for record in present if record.state is EngineState.JOINING]
        errors = await self._each_record(joining, self._make_routable)
        await self._fence_failed(errors)

    async def _make_routable(self, record: EngineRecord, url: str) -> None:
        incarnation = record.incarnation
        await self._router.add(url)
        if record.incarnation == incarnation:  # else it died meanwhile, and is out of the router again
            record.state = EngineState.SERVING
            self._registry.notify()

    async def fence(self, engines: Sequence[str], reason: str) -> None:
        """No new requests; ``supervise`` then ends its process, and with it its requests, and restarts it."""
        for record in self._records(engines):
            if record.state in (EngineState.SERVING, EngineState.JOINING):
                await self._take_out(record, reason)

    async def _fence_disagreeing(self, engines: Sequence[str], version: int) -> None:
        async def check(record: EngineRecord, url: str) -> None:
            info = await self._api.model_info(url, _CALL_SECONDS)
            if info.weight_version != str(version):
                raise EngineError(f"{url}: expected weight version {version}, found {info.weight_version!r}")

        await self._fence_failed(await self._each_record(engines, check))

    async def _fence_failed(self, errors: EngineErrors) -> None:
        for engine, error in errors.items():
            if error is not None:
                await self.fence([engine], str(error))

    async def _drain_by_abort(self, engines: Sequence[str]) -> None:
        """End requests in flight before pausing: SGLang's own abort-pause looks again only after a second."""
        serving = {r.engine_id for r in self._registry.in_state(EngineState.SERVING)}
        if not serving <= set(engines):
            return  # others keep working, so the count of requests in flight says nothing about these
        try:
            async with asyncio.timeout(_ABORT_DRAIN_SECONDS):
                while self._traffic.in_flight:
                    await self._each(engines, lambda url: self._api.abort_all(url, _CALL_SECONDS))
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
        return [self._registry.engines[engine] for engine in engines]

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

        async def one(record: EngineRecord) -> None:
            try:
                if record.url is None:
                    raise EngineError(f"{record.engine_id} is {record.state.value}: {record.reason}")
                results[record.engine_id] = await call(record, record.url)
            except EngineError as error:
                results[record.engine_id] = error

        async with asyncio.TaskGroup() as scope:
            for record in self._records(engines):
                scope.create_task(one(record))
        return {engine: results[engine] for engine in engines}


def _forget(record: EngineRecord, state: EngineState) -> None:
    record.state = state
    record.incarnation += 1
    record.url = None
    record.paused = False
    record.verified = False
    record.version = None


async def _first_of(*waits: Coroutine[Any, Any, str]) -> str:
    """The first result; the other waits are cancelled, and over, when this returns.

    Not a TaskGroup left by an exception: on Python 3.11 that swallows a cancellation from outside which
    arrives in the same moment, and ``supervise`` would never end (python/cpython#116720).
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return done.pop().result()
