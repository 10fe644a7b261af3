"""What keeps engines alive, and how many of them there are.

``start`` brings all of them up. ``supervise`` then follows each through its life: it waits until the engine dies,
becomes unreachable or is fenced, takes it out of the router, restarts it, and leaves it ``joining``: the publisher
brings it to the current weights and the fleet admits it. The states are those of ``registry.py``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from miles_async.engines.kind import LaunchServer, ServerHandle
from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.engines.restarts import RestartBudget
from miles_async.engines.router import Router
from miles_async.errors import ConfigurationError, EngineError, EngineStartError, first_error
from miles_async.runtime.tasks import gathered, quietly
from miles_async.seams import InferenceServer

log = structlog.get_logger(__name__)

DRAIN_SECONDS = 600.0  # for the requests of an engine that is not wanted any more
_DRAIN_POLL_SECONDS = 0.2
_QUIET_POLLS = 10  # in a row
_PROBE_INTERVAL = 5.0
_PROBE_SECONDS = 10.0
_PROBE_FAILURES = 6  # in a row, before a live process counts as unreachable
_PROGRESS_INTERVAL = 30.0
_PROGRESS_SECONDS = 30.0
_PROGRESS_FAILURES = 3  # in a row, before an engine that answers and generates nothing counts as stuck


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGroup:
    """Engines that are alike."""

    name: str = "engine"  # its engines are engine-0, engine-1, ...
    engines: int
    ranks: int = 1  # of each in a process group: its tensor-parallel size
    launch: LaunchServer


@dataclass(slots=True)
class _Engine:
    group: EngineGroup
    index: int
    budget: RestartBudget
    handle: ServerHandle | None = None
    task: asyncio.Task[None] | None = None  # that follows it


class EngineSupervisor:
    """Starts, restarts and ends the engines of one registry."""

    def __init__(
        self,
        registry: EngineRegistry,
        router: Router,
        server: InferenceServer,
        groups: Sequence[EngineGroup],
        *,
        max_restarts: int = 3,
        restart_window: float = 3600.0,
    ) -> None:
        """Starts nothing."""
        self._registry = registry
        self._router = router
        self._server = server
        self.groups = {group.name: group for group in groups}
        self._max_restarts = max_restarts
        self._restart_window = restart_window
        self._engines: dict[str, _Engine] = {}
        self._forgotten: dict[str, int] = {}  # id → its last incarnation
        self._scope: asyncio.TaskGroup | None = None  # of supervise()
        for group in groups:
            for index in range(group.engines):
                self._add(group, index)

    # ------------------------------------------------------------------------------------------- life
    async def start(self) -> None:
        """All engines up and ``joining``. Raises the first EngineStartError that counts, having stopped the others.

        A start that fails is tried again like that of any engine that is lost. Where every engine has failed once and
        none has come up, the next failure ends it: the reason is one that stays, such as the model.
        """
        try:
            await gathered(*map(self._start_at_first, self._registry.engines.values()))
        except BaseException:
            await quietly(self.stop())
            raise

    async def supervise(self) -> None:
        """Keeps engines and router alive until cancelled. Raises EngineError, with last log lines, when it can't."""
        try:
            async with asyncio.TaskGroup() as scope:
                self._scope = scope
                scope.create_task(self._router.supervise())
                for record in self._registry.engines.values():
                    self._follow(scope, record)
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            self._scope = None

    async def stop(self) -> None:
        """End all servers. Never raises for a server that is already gone."""
        async with asyncio.TaskGroup() as scope:
            for engine in self._engines.values():
                if engine.handle is not None:
                    scope.create_task(engine.handle.stop())
        for record in self._registry.engines.values():
            _forget(record, EngineState.GONE)
        self._registry.notify()

    async def wait_for_joining(self) -> None:
        """Until at least one engine waits for weights."""
        await self._registry.wait_until(lambda: bool(self._registry.in_state(EngineState.JOINING)))

    def handle(self, engine_id: str) -> ServerHandle:
        """Handle of the engine's latest start. Raises EngineError before the first."""
        handle = self._engines[engine_id].handle
        if handle is None:
            raise EngineError(f"{engine_id} was never started")
        return handle

    def _add(self, group: EngineGroup, index: int) -> EngineRecord:
        engine_id = f"{group.name}-{index}"
        if (given_up := self._registry.engines.get(engine_id)) is not None:
            self._forgotten[engine_id] = given_up.incarnation
        incarnation = self._forgotten.get(engine_id, -1) + 1  # no number is used twice
        record = EngineRecord(engine_id=engine_id, ranks=group.ranks, incarnation=incarnation)
        self._registry.engines[engine_id] = record
        self._engines[engine_id] = _Engine(group, index, RestartBudget(self._max_restarts, self._restart_window))
        return record

    async def _start(self, record: EngineRecord) -> None:
        engine = self._engines[record.engine_id]
        handle = engine.handle = engine.group.launch(engine.index, record.incarnation)
        record.state = EngineState.STARTING
        self._registry.notify()
        record.url = await handle.start()
        record.state = EngineState.JOINING
        self._registry.notify()
        log.info("engine is up", engine=record.engine_id, url=record.url)

    async def _start_at_first(self, record: EngineRecord) -> None:
        while True:
            try:
                await self._start(record)
                return
            except EngineStartError as error:
                await self._put_away(record, str(error))
                all_failed = all(other.restarts > 0 for other in self._registry.engines.values())
                if (all_failed and not self._registry.urls()) or not self._may_restart(record):
                    raise

    def _follow(self, scope: asyncio.TaskGroup, record: EngineRecord) -> None:
        self._engines[record.engine_id].task = scope.create_task(self._keep(record), name=record.engine_id)

    async def _keep(self, record: EngineRecord) -> None:
        """One engine: wait for its end, restart it, again and again, as long as its budget lasts."""
        reason = await (self._until_lost(record) if record.url else self._start_and_follow(record))
        while True:
            await self._put_away(record, reason)
            if not self._may_restart(record):
                self._give_up(record)
                return
            reason = await self._start_and_follow(record)

    async def _put_away(self, record: EngineRecord, reason: str) -> None:
        await self._take_out(record, reason)
        await self.handle(record.engine_id).stop()

    def _may_restart(self, record: EngineRecord) -> bool:
        if not self._engines[record.engine_id].budget.take():
            return False
        record.restarts += 1
        log.warning("restarting engine", engine=record.engine_id, restart=record.restarts)
        return True

    async def _start_and_follow(self, record: EngineRecord) -> str:
        """Until it is lost, which may be before it is up; why."""
        try:
            await self._start(record)
        except EngineStartError as error:
            return str(error)
        return await self._until_lost(record)

    def _give_up(self, record: EngineRecord) -> None:
        record.state = EngineState.GONE
        self._registry.notify()
        log.error("engine given up", engine=record.engine_id, restarts=record.restarts, reason=record.reason)
        if len(self._registry.in_state(EngineState.GONE)) == len(self._registry.engines):
            raise EngineError(
                f"no engine is left; the last, {record.engine_id}, was restarted "
                f"{self._engines[record.engine_id].budget}: {record.reason}"
            )

    async def _until_lost(self, record: EngineRecord) -> str:
        """Why the engine has to be restarted, as soon as it has to."""
        incarnation = record.incarnation

        async def fenced() -> str:
            await self._registry.wait_until(lambda: record.incarnation != incarnation)
            return record.reason

        return await _first_of(
            self.handle(record.engine_id).wait_exit(), self._until_unusable(record), self._until_stuck(record), fenced()
        )

    async def _until_unusable(self, record: EngineRecord) -> str:
        """For machines that vanish without closing connections, and servers that somebody else gave other weights."""
        failures, url = 0, record.url
        assert url is not None
        while failures < _PROBE_FAILURES:
            await asyncio.sleep(_PROBE_INTERVAL)
            expected = record.version if record.verified else None
            try:
                found = await self._server.weight_version(url, _PROBE_SECONDS)
                failures = 0
            except EngineError as error:
                failures += 1
                log.warning("engine does not answer", engine=record.engine_id, failures=failures, error=str(error))
                continue
            still = record.version if record.verified else None
            if expected is not None and still == expected and found != str(expected):
                return f"says that it holds version {found}, and was given {expected}"
        return f"did not answer {failures} times in a row"

    async def _until_stuck(self, record: EngineRecord) -> str:
        """For servers that answer whatever one asks and generate nothing. A pause is no reason."""
        failures, url = 0, record.url
        assert url is not None
        while failures < _PROGRESS_FAILURES:
            await asyncio.sleep(_PROGRESS_INTERVAL)
            if record.state is not EngineState.SERVING or record.paused:
                continue
            version = record.version
            try:
                await self._server.make_progress(url, _PROGRESS_SECONDS)
                failures = 0
            except EngineError as error:
                if not record.paused and record.version == version:
                    failures += 1
                    log.warning(
                        "engine generates nothing", engine=record.engine_id, failures=failures, error=str(error)
                    )
        return f"generated nothing {failures} times in a row"

    # --------------------------------------------------------------------------------- in and out of the router
    async def fence(self, record: EngineRecord, reason: str) -> None:
        """No new requests; :meth:`supervise` then ends its process, and with it its requests, and restarts it."""
        if record.state in (EngineState.SERVING, EngineState.JOINING):
            await self._take_out(record, reason)

    async def make_routable(self, record: EngineRecord, url: str) -> None:
        """Have a joining engine serve from now on. Raises EngineError if the router does not take it."""
        incarnation = record.incarnation
        await self._router.add(url)
        if record.incarnation == incarnation and record.state is EngineState.JOINING:
            record.state = EngineState.SERVING
            self._registry.notify()
        elif self._registry.answering_at(url) is None:  # lost or drained meanwhile, maybe before the router had it
            await self._unregister(url)

    async def _take_out(self, record: EngineRecord, reason: str) -> None:
        """Void everything known of this engine; no-op if it is out already."""
        if record.state in (EngineState.FENCED, EngineState.DRAINING):
            return
        url = record.url
        record.reason = reason
        _forget(record, EngineState.FENCED)
        self._registry.notify()
        log.warning("engine fenced", engine=record.engine_id, reason=reason)
        if url is not None:
            await self._unregister(url)

    async def _unregister(self, url: str) -> None:
        try:
            await self._router.remove(url)
        except EngineError as error:  # a router that is down knows only who serves when it is back
            log.warning("router could not remove engine", url=url, error=str(error))

    # ------------------------------------------------------------------------------------------- how many
    def members(self, group_name: str) -> list[EngineRecord]:
        """The engines of a group that are not on their way out, oldest first."""
        return [
            self._registry.engines[engine_id]
            for engine_id, engine in self._engines.items()
            if engine.group.name == group_name
            and self._registry.engines[engine_id].state not in (EngineState.DRAINING, EngineState.GONE)
        ]

    async def scale(self, group_name: str, engines: int) -> None:
        """More engines come up as ``joining``; the newest are drained where fewer are wanted. Returns at once.

        Raises ConfigurationError: there is no such group, or no engine would be left.
        """
        assert self._scope is not None, "scale() is for engines that are supervised"
        group = self.groups.get(group_name)
        if group is None:
            raise ConfigurationError(f"there is no group {group_name}; there are {', '.join(self.groups)}")
        others = sum(len(self.members(name)) for name in self.groups if name != group_name)
        if engines < 0 or engines + others < 1:
            raise ConfigurationError(f"group {group_name} cannot have {engines} engines: at least one has to be left")
        members = self.members(group_name)
        for _ in range(engines - len(members)):
            self._follow(self._scope, self._add(group, self._free_index(group)))
        for record in members[engines:]:
            was_serving, record.state = record.state is EngineState.SERVING, EngineState.DRAINING
            self._registry.notify()
            self._scope.create_task(self._drain(record, was_serving), name=f"drain {record.engine_id}")

    def _free_index(self, group: EngineGroup) -> int:
        """The lowest that no engine has, or one that was given up."""
        taken = {
            engine.index
            for engine_id, engine in self._engines.items()
            if engine.group is group and self._registry.engines[engine_id].state is not EngineState.GONE
        }
        return next(index for index in itertools.count() if index not in taken)

    async def _drain(self, record: EngineRecord, was_serving: bool) -> None:
        """No new requests; when those that it has are answered, it is ended and forgotten."""
        engine = self._engines[record.engine_id]
        log.info("draining engine", engine=record.engine_id)
        if engine.task is not None:
            engine.task.cancel()
        if record.url is not None and was_serving:
            await self._unregister(record.url)
            with suppress(TimeoutError, EngineError):  # it is ended all the same
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self._until_quiet(record.url)
        if engine.handle is not None:
            await engine.handle.stop()
        del self._engines[record.engine_id], self._registry.engines[record.engine_id]
        self._forgotten[record.engine_id] = record.incarnation
        self._registry.notify()
        log.info("engine is gone", engine=record.engine_id)

    async def _until_quiet(self, url: str) -> None:
        """For a while: what the router passed on last is not in the engine's queue at once."""
        quiet = 0
        while quiet < _QUIET_POLLS:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
            load = await self._server.load(url, _PROBE_SECONDS)
            quiet = 0 if load.running or load.waiting else quiet + 1


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
