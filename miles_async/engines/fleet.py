"""The engines as the publisher sees them: operations on the named engines concurrently.

An operation counts only for engines that have not been restarted by the time all have answered: one that restarts in
the middle of an update has received nothing of it.

``supervisor.py`` keeps engines alive; ``registry.py`` describes their states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, cast

import structlog

from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.engines.supervisor import EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineError, EngineTimeoutError
from miles_async.seams import EngineErrors, InferenceServer, arguments_of
from miles_async.types import FleetMembers, Incarnation

log = structlog.get_logger(__name__)

Ts = TypeVarTuple("Ts")
Result = TypeVar("Result")

_ABORT_DRAIN_SECONDS = 5.0  # wait for aborted requests before the engine is paused anyway
_ABORT_POLL_SECONDS = 0.05
_BRIEF_SECONDS = 10.0
# In steps. A stream may take all of a publication; files hold all weights, and there is no second try.
_DEADLINES: Mapping[Callable[..., object], int] = {InferenceServer.receive_stream: 6, InferenceServer.load_files: 3}
_REPLACE_WEIGHTS: Collection[Callable[..., object]] = {
    InferenceServer.begin_update,
    InferenceServer.receive_stream,
    InferenceServer.load_files,
    InferenceServer.release_memory,
}


@dataclass(slots=True)
class _Stream:
    """Deadline of engines that receive a stream of weights, known only when its senders have finished."""

    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    granted: float = 0.0  # seconds after the senders had finished


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
        """``step_timeout``: seconds for an operation, or one bucket."""
        self._registry = registry
        self._supervisor = supervisor
        self._server = server
        self._traffic = traffic
        self._step_timeout = step_timeout
        self._brief_timeout = min(step_timeout / 3, _BRIEF_SECONDS)
        self._streams: dict[frozenset[Incarnation], _Stream] = {}  # being received, by engines

    async def members(self) -> FleetMembers:
        records = [r for r in self._registry.engines.values() if r.state is not EngineState.GONE]
        starting = (EngineState.STARTING, EngineState.FENCED)
        return FleetMembers(
            serving=tuple(r.current for r in records if r.state is EngineState.SERVING),
            joining=tuple(r.current for r in records if r.state is EngineState.JOINING),
            starting=tuple(r.engine_id for r in records if r.state in starting),
            ranks={r.engine_id: r.ranks for r in records},
            bucketwise=frozenset(r.engine_id for r in records if not r.streams),
        )

    async def call(
        self,
        engines: Sequence[Incarnation],
        operation: Callable[[InferenceServer, str, *Ts, float], Coroutine[Any, Any, Result]],
        *arguments: *Ts,
        brief: bool = False,
    ) -> Mapping[Incarnation, Result | Exception]:
        await self._prepare(engines, operation, arguments)
        timeout = self._brief_timeout if brief else _DEADLINES.get(operation, 1) * self._step_timeout
        method: Callable[..., Coroutine[Any, Any, Result]] = getattr(self._server, operation.__name__)
        tasks = {
            engine: asyncio.create_task(method(record.url, *arguments_of(engine, arguments), timeout))
            for engine, record in self._up(engines).items()
        }
        stream = _Stream()
        if operation is InferenceServer.receive_stream:
            self._streams[frozenset(engines)] = stream
        try:
            with suppress(TimeoutError):
                async with stream.limit:  # gather ends them all, and waits for that, if it is cancelled
                    await asyncio.gather(*tasks.values(), return_exceptions=True)
        finally:
            self._streams.pop(frozenset(engines), None)
        results = self._results(engines, tasks, stream.granted)
        self._note(operation, results)
        return results

    async def stream_sent(self, engines: Sequence[Incarnation], *, broken: bool) -> None:
        """Grant less time after an error: members of a process group notice it at the same time."""
        if stream := self._streams.get(frozenset(engines)):
            stream.granted = self._brief_timeout if broken else self._step_timeout
            stream.limit.reschedule(asyncio.get_running_loop().time() + stream.granted)

    async def on_host(
        self, engines: Sequence[Incarnation], function: Callable[[Path, *Ts], Result], *arguments: *Ts, room: int = 0
    ) -> Mapping[Incarnation, Result | Exception]:
        async def run(record: EngineRecord) -> Result:
            handle = self._supervisor.handle(record.engine_id)
            try:
                async with asyncio.timeout(self._step_timeout):
                    answer: Result = await handle.on_host(function, room, *arguments)
                    return answer
            except TimeoutError:
                raise EngineTimeoutError(
                    f"its host did not {function.__name__} within {self._step_timeout:g} s"
                ) from None

        tasks = {engine: asyncio.create_task(run(record)) for engine, record in self._up(engines).items()}
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        return self._results(engines, tasks)

    async def begin_trial(self, engines: Sequence[Incarnation], version: int) -> None:
        for record in self._up(engines).values():
            if record.state is EngineState.SERVING:
                record.on_trial, record.version = True, version
        self._registry.notify()

    async def admit(self, engines: Sequence[Incarnation], version: int) -> EngineErrors:
        """Route requests to these engines, under ``version``."""
        errors: dict[Incarnation, Exception | None] = {}
        for engine, claimed in (await self.call(engines, InferenceServer.weight_version)).items():
            wrong = EngineError(f"{engine}: expected weight version {version}, found {claimed!r}")
            errors[engine] = claimed if isinstance(claimed, Exception) else None if claimed == str(version) else wrong
        present = self._up(engine for engine, error in errors.items() if error is None)
        for record in present.values():
            record.verified, record.on_trial, record.version = True, False, version
        self._registry.notify()  # engines that served before continue now; the router takes seconds to learn of others
        admit = self._supervisor.routing.admit
        joining = {engine: record for engine, record in present.items() if record.state is EngineState.JOINING}
        tasks = {engine: asyncio.create_task(admit(record)) for engine, record in joining.items()}
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        return errors | self._results(joining, tasks)

    async def fence(self, engines: Sequence[Incarnation], reason: str) -> None:
        for engine in engines:
            for record in self._up([engine]).values():  # as of now: fencing the one before took time
                await self._supervisor.routing.fence(record, reason)

    async def _prepare(
        self, engines: Sequence[Incarnation], operation: Callable[..., object], arguments: Sequence[object]
    ) -> None:
        """Update the registry before engines are called."""
        if operation is InferenceServer.pause:
            for record in self._up(engines).values():
                record.pause()  # requests wait on the client from now on
            self._registry.notify()
            if arguments == ("abort",):
                await self._drain_by_abort(engines)
        if operation in _REPLACE_WEIGHTS:
            for record in self._up(engines).values():
                record.verified = record.on_trial = False  # no answer counts until the new weights are verified
            self._registry.notify()

    def _note(self, operation: Callable[..., object], results: Mapping[Incarnation, object]) -> None:
        """Update the registry after engines have answered."""
        succeeded = self._up(engine for engine, found in results.items() if not isinstance(found, Exception))
        if operation is InferenceServer.resume:
            for record in succeeded.values():
                record.resume()  # requests still wait if weights were replaced
            self._registry.notify()
        elif operation is InferenceServer.probe:
            for engine, record in succeeded.items():
                record.tokens_in_flight = cast(int, results[engine])

    async def _drain_by_abort(self, engines: Sequence[Incarnation]) -> None:
        """End requests in flight before pausing: a server's own pause may notice their end a second late."""
        states = (EngineState.SERVING, EngineState.DRAINING)
        answering = {record.current for state in states for record in self._registry.in_state(state)}
        if not answering <= set(engines):
            return  # others keep working, so the count of requests in flight says nothing about these
        try:
            async with asyncio.timeout(_ABORT_DRAIN_SECONDS):
                while self._traffic.in_flight:
                    await self.call(engines, InferenceServer.abort_all)
                    await asyncio.sleep(_ABORT_POLL_SECONDS)
        except TimeoutError:
            log.warning("requests did not end by abort", in_flight=self._traffic.in_flight)

    def _up(self, engines: Iterable[Incarnation]) -> dict[Incarnation, EngineRecord]:
        """Records of the engines that are up and have been neither restarted nor removed."""
        return {engine: self._registry.engines[engine.engine] for engine in engines if self._end_of(engine) is None}

    def _end_of(self, engine: Incarnation) -> EngineError | None:
        """Why that start of the engine has ended; None while it is up."""
        record = self._registry.engines.get(engine.engine)
        if record is None:
            return EngineError(f"{engine} is gone")
        if record.incarnation != engine.number or record.url is None:
            return EngineError(f"{engine} was lost and is {record.state.value}: {record.reason}")
        return None

    def _results(
        self, engines: Iterable[Incarnation], tasks: Mapping[Incarnation, asyncio.Task[Result]], granted: float = 0.0
    ) -> dict[Incarnation, Result | Exception]:
        """Results of tasks that have ended, EngineErrors among them; the loss of an engine before all others had
        answered. ``granted``: seconds that cancelled ones had.
        """
        results: dict[Incarnation, Result | Exception] = {}
        for engine in engines:
            if end := self._end_of(engine):
                results[engine] = end
            elif (task := tasks[engine]).cancelled():
                late = f"waited for weights: no answer within {granted:g} s after the senders had finished"
                results[engine] = EngineTimeoutError(late)
            elif isinstance(error := task.exception(), EngineError):
                results[engine] = error
            else:
                results[engine] = task.result()
        return results
