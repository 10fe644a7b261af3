"""Servers in Ray actors: the only file of this folder that knows Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles_async.engines.kind import Arguments, EngineKind, Result, ServerHandle, ServerSpec
from miles_async.engines.server_process import ServerProcess
from miles_async.errors import ConfigurationError, EngineError, EngineStartError, ProcessLostError
from miles_async.runtime.actor_link import ActorLink
from miles_async.runtime.call_once import CallId, CallOnce
from miles_async.runtime.nodes import NO_LABELS, alive_nodes, describe_nodes
from miles_async.runtime.ray_errors import why_gone
from miles_async.runtime.reservation import Reservation

_STOP_SECONDS = 10.0


class RayServers:
    """A ``LaunchServer``: each server in its own Ray actor, which holds the server's GPUs."""

    def __init__(
        self,
        kind: EngineKind,
        spec: ServerSpec,
        labels: Mapping[str, str] = NO_LABELS,
        interpreter: str | None = None,
        node_ids: Sequence[Sequence[str]] = (),
    ) -> None:
        """``labels``: of the nodes that may have engines. ``interpreter``: command that Ray starts the actors'
        processes with; None: that of this process. ``node_ids``: the nodes of the first engines, if they are decided
        already.
        """
        self._kind = kind
        self._spec = spec
        self._labels = labels
        self._interpreter = interpreter
        self._node_ids = node_ids

    def __call__(self, engine_index: int, incarnation: int) -> ServerHandle:
        node_ids = self._node_ids[engine_index] if engine_index < len(self._node_ids) else ()
        return _RayServer(self._kind, self._spec, self._labels, self._interpreter, node_ids, engine_index, incarnation)


class EngineActor:
    """One start of one server, in an actor. Calls that its caller repeats are executed once."""

    def __init__(self, kind: EngineKind, spec: ServerSpec, engine_index: int, incarnation: int) -> None:
        self._server = ServerProcess(kind, spec, engine_index, incarnation)
        self._once = CallOnce()

    async def perform(self, call: CallId, method: Callable[..., Awaitable[Result]], *arguments: object) -> Result:
        """Await ``method``, a function of ServerProcess, unless ``call`` was executed before: then answer the same."""
        return await self._once.run_async(call, lambda: method(self._server, *arguments))


class _RayServer:
    """Implements ServerHandle.

    An actor that cannot be reached is called again for a while: whether its server answers HTTP decides meanwhile
    whether the engine is given up (``health.py``).
    """

    def __init__(
        self,
        kind: EngineKind,
        spec: ServerSpec,
        labels: Mapping[str, str],
        interpreter: str | None,
        node_ids: Sequence[str],
        engine_index: int,
        incarnation: int,
    ) -> None:
        self._spec = spec
        self._arguments = (kind, spec, engine_index, incarnation)
        self._engine_index = engine_index
        self._labels = labels
        self._process = {} if interpreter is None else {"runtime_env": {"py_executable": interpreter}}
        self._link = ActorLink(f"the actor of {spec.group}-{engine_index}")
        self._gpus = spec.tensor_parallel_size if spec.device == "cuda" else 0
        self._reservation = Reservation({"GPU": self._gpus}, 1, labels, node_ids) if self._gpus else None
        self._actor: Any = None

    async def start(self) -> str:
        import ray

        place = await self._place()
        options = {"num_cpus": 0, "num_gpus": self._gpus, "scheduling_strategy": place, **self._process}
        self._actor = ray.remote(EngineActor).options(**options).remote(*self._arguments)
        deadline = self._spec.start_timeout + 60  # of Ray, to start the actor, which keeps its own
        try:
            async with asyncio.timeout(deadline):
                return await self._perform(self._actor, ServerProcess.start)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EngineStartError | ConfigurationError):
                raise error.cause from None
            raise EngineStartError(f"engine actor failed: {error}") from error
        except (ray.exceptions.RayError, ProcessLostError) as error:
            raise EngineStartError(f"engine actor died while it started: {why_gone(error)}") from error
        except TimeoutError:
            raise EngineStartError(f"Ray did not start the engine's actor within {deadline:g} s") from None

    async def _place(self) -> object:
        """Choose the node: one with free GPUs, which are reserved. Without GPUs there is nothing by which Ray could
        spread engines, so they take turns.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._reservation is not None:
            if not await self._reservation.reserve(self._spec.start_timeout):
                raise EngineStartError(
                    f"Ray did not find a node{self._labelled()} with {self._gpus} free GPUs for an engine within "
                    f"{self._spec.start_timeout:g} s (--engine-start-timeout); the cluster has {describe_nodes()} "
                    "(--rollout-num-gpus, --rollout-num-gpus-per-engine)"
                )
            return self._reservation.on(0)
        nodes = await asyncio.to_thread(alive_nodes, self._labels)
        if not nodes:
            raise EngineStartError(
                f"expected nodes{self._labelled()} for engines, found {describe_nodes()} (--rollout-node-labels)"
            )
        node = nodes[self._engine_index % len(nodes)]
        return NodeAffinitySchedulingStrategy(node.node_id, soft=False)

    def _labelled(self) -> str:
        return f" labelled {dict(self._labels)}" if self._labels else ""

    async def wait_exit(self) -> str:
        import ray

        try:
            return await self._perform(self._actor, ServerProcess.wait_exit)
        except (ray.exceptions.RayError, ProcessLostError) as error:
            return f"its actor is gone: {why_gone(error)}"

    async def on_host(
        self, function: Callable[[Path, *Arguments], Result], room: int, *arguments: *Arguments
    ) -> Result:
        import ray

        if self._actor is None:
            raise EngineError("it was stopped")
        try:  # Ray resolves references among the arguments on the way
            return await self._perform(self._actor, ServerProcess.on_host, function, room, *arguments)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, EngineError) else EngineError(str(error)) from None
        except (ray.exceptions.RayError, ProcessLostError) as error:
            raise EngineError(f"its actor is gone: {why_gone(error)}") from error

    async def stop(self) -> None:
        import ray

        actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(ray.exceptions.RayError, ProcessLostError, TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._perform(actor, ServerProcess.stop)
            ray.kill(actor, no_restart=True)  # and with it, by PR_SET_PDEATHSIG, whatever stop left
        if self._reservation is not None:
            self._reservation.release()

    async def _perform(self, actor: Any, method: Callable[..., Awaitable[Result]], *arguments: object) -> Result:
        return await self._link.call(lambda call: actor.perform.remote(call, method, *arguments))
