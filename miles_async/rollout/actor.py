"""The rollout side's process: a Ray actor, and stand-ins that call it from the driver.

The actor builds its parts itself, from a function that ``wiring/driver.py`` passes, so nothing with an open socket
ever has to be pickled.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import ray

from miles_async.errors import ProcessLostError
from miles_async.runtime import garbage
from miles_async.runtime.cluster.actor_link import ActorLink, why_gone
from miles_async.runtime.cluster.call_once import CallId, CallOnce
from miles_async.runtime.processes.output import redirect_output
from miles_async.runtime.user_code import contain_user_code
from miles_async.seams import EngineFleet, RolloutSide

T = TypeVar("T")

PartName = Literal["manager", "fleet", "evaluation_fleet"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutParts:
    """The objects that the actor hosts, addressed by field name."""

    manager: RolloutSide
    fleet: EngineFleet
    evaluation_fleet: EngineFleet | None = None  # separate engines for evaluation


BuildParts = Callable[[], Awaitable[RolloutParts]]


class RolloutActor:
    """Hosts the parts and runs their methods on one event loop."""

    def __init__(self, build: BuildParts, log_file: Path | None = None) -> None:
        """``build`` starts the parts; it runs in the actor's process. ``log_file``: for what hooks print."""
        if log_file is not None:
            redirect_output(log_file)
        self._build = build
        self._parts: RolloutParts | None = None
        self._once = CallOnce()

    async def start(self, call: CallId) -> None:
        """Build the parts. Raises what building raises; nothing is left running then."""
        contain_user_code(asyncio.get_running_loop())
        await self._once.run_async(call, self._start)

    async def call(self, call: CallId, part: PartName, method: str, *arguments: object, **named: object) -> object:
        """Await a method of a part's protocol, for :func:`stand_in`, unless ``call`` was executed before."""
        return await self._once.run_async(
            call, lambda: getattr(getattr(self._parts, part), method)(*arguments, **named)
        )

    async def ping(self) -> None:
        """Show that the event loop is not blocked."""

    async def _start(self) -> None:
        self._parts = await self._build()
        garbage.settle()


def stand_in(protocol: type[T], forward: Callable[..., Awaitable[object]]) -> T:
    """An object with the coroutine methods of ``protocol``, each of which is ``forward(name, *arguments, **named)``.

    >>> fleet = stand_in(EngineFleet, forward)
    >>> members = await fleet.members()
    """
    methods = [name for name, _ in inspect.getmembers(protocol, inspect.iscoroutinefunction)]
    return type(f"Remote{protocol.__name__}", (), {name: staticmethod(partial(forward, name)) for name in methods})()


async def _result(link: ActorLink, make: Callable[[CallId], Awaitable[T]]) -> T:
    """Await a remote call; raise its error as it was raised there. Raises ProcessLostError if the process is gone."""
    try:
        return await link.call(make)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ProcessLostError(f"the rollout manager's process died: {why_gone(error)}") from error


class RolloutProcess:
    """The rollout actor from outside: placed at construction, parts usable after :meth:`start`."""

    def __init__(
        self, build: BuildParts, interpreter: str | None = None, *, patience: float, log_file: Path | None = None
    ) -> None:
        """Place it on this node, where the run directory is.

        ``interpreter``: command that Ray starts its process with; None: this process's. ``patience``: seconds that its
        event loop may be blocked, once it has started. ``log_file``: of its output.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        process = {} if interpreter is None else {"runtime_env": {"py_executable": interpreter}}
        options = {"num_cpus": 0, "scheduling_strategy": here, "max_concurrency": 1000, **process}
        self._actor = ray.remote(RolloutActor).options(**options).remote(build, log_file)
        self._link = ActorLink("the rollout manager's process", self._ping, patience=patience)
        self._started = False
        self.manager = stand_in(RolloutSide, partial(self._call, "manager"))
        self.fleet = stand_in(EngineFleet, partial(self._call, "fleet"))
        self.evaluation_fleet = stand_in(EngineFleet, partial(self._call, "evaluation_fleet"))

    async def _call(self, part: PartName, method: str, /, *arguments: object, **named: object) -> object:
        return await _result(self._link, lambda call: self._actor.call.remote(call, part, method, *arguments, **named))

    async def _ping(self) -> None:
        if self._started:  # reading prompts may take its event loop minutes
            await self._actor.ping.remote()

    async def start(self) -> None:
        """Start engines and router. Raises EngineStartError, DataError, ConfigurationError."""
        await _result(self._link, self._actor.start.remote)
        self._started = True

    async def stop(self, timeout: float) -> None:
        """Let the manager stop its processes, then end the actor in any case."""
        try:
            if self._started:  # else there is no manager yet, and what it started dies with its process
                with suppress(TimeoutError, ProcessLostError):  # it hangs, or is gone
                    async with asyncio.timeout(timeout):
                        await self.manager.stop()
        finally:
            ray.kill(self._actor)
