"""The rollout side in a process of its own: a Ray actor, and stand-ins that call it from the driver.

The actor builds its parts itself, from a function that ``wiring/driver.py`` passes, so nothing with an open socket
ever has to be pickled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle

from miles_async.errors import EngineError
from miles_async.runtime import garbage
from miles_async.runtime.ray_errors import why_gone

BuildParts = Callable[[], Awaitable[Mapping[str, Any]]]


class RolloutActor:
    """Hosts named parts (the manager, the fleet) and runs their async methods on one event loop."""

    def __init__(self, build: BuildParts) -> None:
        """``build`` starts the parts and returns them by name; it runs in the actor's process."""
        self._build = build
        self._parts: Mapping[str, Any] = {}

    async def start(self) -> None:
        """Build the parts. Raises what building raises; nothing is left running then."""
        self._parts = await self._build()
        garbage.settle()

    async def call(self, part: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Await ``parts[part].method(*args, **kwargs)``."""
        return await getattr(self._parts[part], method)(*args, **kwargs)


class RemotePart:
    """A part of a RolloutActor as if it were local: every method is a coroutine.

    Stands behind the RolloutSide and EngineFleet protocols in the driver.
    """

    def __init__(self, actor: ActorHandle, part: str) -> None:
        self._actor = actor
        self._part = part

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await _result(self._actor.call.remote(self._part, method, *args, **kwargs))

        return call


async def _result(reference: ray.ObjectRef[Any]) -> Any:
    """What a call returned; what it raised, as it was raised there."""
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise EngineError(f"the rollout manager's process died: {why_gone(error)}") from error


class RolloutProcess:
    """The rollout actor from outside: placed at construction, parts usable after :meth:`start`."""

    def __init__(self, build: BuildParts) -> None:
        """It is placed on this node, where the run directory is."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": here, "max_concurrency": 1000}
        self._actor = ray.remote(RolloutActor).options(**options).remote(build)
        self._started = False
        self.manager = self.part("manager")

    def part(self, name: str) -> RemotePart:
        """One of the actor's parts."""
        return RemotePart(self._actor, name)

    async def start(self) -> None:
        """Engines and router up. Raises EngineStartError, DataError, ConfigurationError."""
        await _result(self._actor.start.remote())
        self._started = True

    async def stop(self, timeout: float) -> None:
        """Let the manager stop its processes, then end the actor whatever it did."""
        try:
            if self._started:  # else there is no manager yet, and what it started dies with its process
                with suppress(TimeoutError, EngineError):  # it hangs, or is gone
                    async with asyncio.timeout(timeout):
                        await self.manager.stop()
        finally:
            ray.kill(self._actor)
