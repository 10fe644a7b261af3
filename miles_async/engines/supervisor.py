"""Starts, restarts and scales engines.

``start`` brings them up. ``supervise`` then follows each through its life: it waits until the engine dies, becomes
unreachable or is fenced, takes it out of the router, restarts it, and leaves it ``joining``: the publisher brings it to
the current weights and the fleet admits it. ``registry.py`` describes the states.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from miles_async.engines.health import EngineHealth
from miles_async.engines.kind import LaunchServer, ServerHandle
from miles_async.engines.registry import MOST_WRONG_ANSWERS, EngineRecord, EngineRegistry, EngineState
from miles_async.engines.router import Router, Routing
from miles_async.errors import ConfigurationError, EngineError, EngineStartError, ProcessLostError, first_error
from miles_async.runtime.processes.restarts import RestartBudget
from miles_async.runtime.tasks import first_of, gathered, quietly
from miles_async.seams import InferenceServer

log = structlog.get_logger(__name__)

DRAIN_SECONDS = 600.0  # for the requests of an engine that is no longer wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGroup:
    """Engines of the same kind, with the same settings."""

    name: str = "engine"  # its engines are engine-0, engine-1, ...
    engines: int
    ranks: int = 1  # tensor-parallel size of each engine: its ranks in a process group
    streams: bool = False  # they receive all buckets of a publication by one call
    launch: LaunchServer


@dataclass(slots=True)
class _Engine:
    group: EngineGroup
    index: int
    budget: RestartBudget
    handle: ServerHandle | None = None
    task: asyncio.Task[None] | None = None  # follows it through its life


class EngineSupervisor:
    """Starts, restarts and scales the engines of one registry."""

    def __init__(
        self,
        registry: EngineRegistry,
        router: Router,
        server: InferenceServer,
        groups: Sequence[EngineGroup],
        *,
        max_restarts: int = 3,
        restart_window: float = 3600.0,
        needed: bool = True,
    ) -> None:
        """Start nothing yet. ``needed``: the run cannot continue without any of these engines."""
        self._registry = registry
        self._router = router
        self._health = EngineHealth(server, registry)
        self.routing = Routing(registry, router)
        self.groups = {group.name: group for group in groups}
        self._max_restarts = max_restarts
        self._restart_window = restart_window
        self._needed = needed
        self._engines: dict[str, _Engine] = {}
        self._forgotten: dict[str, int] = {}  # id of an engine that is gone → its last incarnation
        self._scope: asyncio.TaskGroup | None = None  # of supervise()
        for group in groups:
            for index in range(group.engines):
                self._add(group, index)

    # ------------------------------------------------------------------------------------------- life
    async def start(self) -> None:
        """Start all engines; return when at least one is ``joining`` and none is at its first start.

        An engine that fails is restarted as it would be later in its life: by :meth:`supervise`, if others are up. If
        all have failed once and none is up, the next failure is considered permanent, such as a wrong model.
        Raises EngineStartError then, or when no engine has restarts left, and ConfigurationError at once if a node
        lacks files; everything is stopped by then.
        """
        try:
            await gathered(*map(self._start_at_first, self._registry.engines.values()))
        except BaseException:
            await quietly(self.stop())
            raise

    async def supervise(self) -> None:
        """Keep engines and router alive until cancelled. Raises EngineError, with last log lines, if that fails."""
        try:
            async with asyncio.TaskGroup() as scope:
                self._scope = scope
                scope.create_task(self._router.supervise())
                for record in self._registry.engines.values():
                    if record.state is not EngineState.GONE:
                        self._follow(scope, record)
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            self._scope = None

    async def stop(self) -> None:
        async with asyncio.TaskGroup() as scope:
            for engine in self._engines.values():
                if engine.handle is not None:
                    scope.create_task(engine.handle.stop())
        for record in self._registry.engines.values():
            record.forget(EngineState.GONE)
        self._registry.notify()

    async def wait_for_joining(self) -> None:
        """Wait until at least one engine waits for weights."""
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
        record = EngineRecord(engine_id=engine_id, ranks=group.ranks, streams=group.streams, incarnation=incarnation)
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
                if self._registry.urls():
                    return  # it is fenced; supervise() restarts it
                if all(other.restarts > 0 for other in self._registry.engines.values()):
                    raise
                if not self._may_restart(record):
                    self._give_up(record)
                    if self._all_gone():
                        raise
                    return

    def _follow(self, scope: asyncio.TaskGroup, record: EngineRecord) -> None:
        self._engines[record.engine_id].task = scope.create_task(self._keep(record), name=record.engine_id)

    async def _keep(self, record: EngineRecord) -> None:
        """Follow one engine: wait for its end and restart it, as long as its budget lasts."""
        reason = record.reason
        if record.state is not EngineState.FENCED:  # else its first start has failed
            reason = await (self._until_lost(record) if record.url else self._start_and_follow(record))
        await self._put_away(record, reason)
        while self._may_restart(record):
            reason = await self._start_and_follow(record)
            await self._put_away(record, reason)
        self._give_up(record)
        self._require_engines(record)

    async def _put_away(self, record: EngineRecord, reason: str) -> None:
        await self.routing.take_out(record, reason)
        await self.handle(record.engine_id).stop()

    def _may_restart(self, record: EngineRecord) -> bool:
        if not self._engines[record.engine_id].budget.take():
            return False
        record.restarts += 1
        log.warning("restarting engine", engine=record.engine_id, restart=record.restarts)
        return True

    async def _start_and_follow(self, record: EngineRecord) -> str:
        """Start an engine and wait until it is lost, maybe before it is up. Returns why."""
        try:
            await self._start(record)
        except (EngineStartError, ConfigurationError) as error:  # a node that joined late may lack files
            return str(error)
        return await self._until_lost(record)

    def _give_up(self, record: EngineRecord) -> None:
        record.state = EngineState.GONE
        self._registry.notify()
        log.error("engine given up", engine=record.engine_id, restarts=record.restarts, reason=record.reason)

    def _require_engines(self, last: EngineRecord) -> None:
        """Raise EngineError if all engines are given up, ``last`` being one of them, and the run needs some."""
        if not self._all_gone():
            return
        budget = self._engines[last.engine_id].budget
        # Without a restart it is unknown whether one would have helped: the run may succeed on another try.
        untried = not any(other.restarts for other in self._registry.engines.values())
        error = (ProcessLostError if untried else EngineError)(
            f"no engine is left; the last, {last.engine_id}, was restarted {budget} (--engine-max-restarts, "
            f"--engine-restart-window): {last.reason}"
        )
        if self._needed:
            raise error
        log.error("continues without these engines; `miles-async scale` starts others", error=str(error))

    def _all_gone(self) -> bool:
        return all(record.state is EngineState.GONE for record in self._registry.engines.values())

    async def _until_lost(self, record: EngineRecord) -> str:
        """Wait until the engine has to be restarted. Returns why."""
        incarnation = record.incarnation

        async def fenced_or_wrong() -> str:
            await self._registry.wait_until(
                lambda: record.incarnation != incarnation or len(record.wrong_answers) >= MOST_WRONG_ANSWERS
            )
            return record.reason

        handle = self.handle(record.engine_id)
        return await first_of(
            handle.wait_exit(),
            self._health.until_unusable(record, handle.on_host),
            self._health.until_stuck(record, handle.on_host),
            fenced_or_wrong(),
        )

    # ------------------------------------------------------------------------------------------- how many
    def members(self, group_name: str) -> list[EngineRecord]:
        """Engines of a group that are not being drained, oldest first."""
        return [
            self._registry.engines[engine_id]
            for engine_id, engine in self._engines.items()
            if engine.group.name == group_name
            and self._registry.engines[engine_id].state not in (EngineState.DRAINING, EngineState.GONE)
        ]

    async def scale(self, group_name: str, engines: int) -> None:
        """Set the number of engines of a group: start more, or drain the newest. Returns at once.

        Raises ConfigurationError if there is no such group, or no engine would be left.
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
            if (following := self._engines[record.engine_id].task) is not None:
                following.cancel()
            was_serving, record.state = record.state is EngineState.SERVING, EngineState.DRAINING
            self._registry.notify()
            self._scope.create_task(self._drain(record, was_serving), name=f"drain {record.engine_id}")

    def _free_index(self, group: EngineGroup) -> int:
        """Lowest index without an engine that is not given up."""
        taken = {
            engine.index
            for engine_id, engine in self._engines.items()
            if engine.group is group and self._registry.engines[engine_id].state is not EngineState.GONE
        }
        return next(index for index in itertools.count() if index not in taken)

    async def _drain(self, record: EngineRecord, was_serving: bool) -> None:
        """Send an engine no new requests; end and forget it once its requests are answered."""
        engine = self._engines[record.engine_id]
        log.info("draining engine", engine=record.engine_id)
        if record.url is not None and was_serving:
            await self.routing.remove(record.url)
            with suppress(TimeoutError, EngineError):  # end it anyway
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self._health.until_quiet(record.url)
        if engine.handle is not None:
            await engine.handle.stop()
        del self._engines[record.engine_id], self._registry.engines[record.engine_id]
        self._forgotten[record.engine_id] = record.incarnation
        self._registry.notify()
        log.info("engine is gone", engine=record.engine_id)
        if self._engines:  # the others may have been given up meanwhile
            self._require_engines([*self._registry.engines.values()][-1])
