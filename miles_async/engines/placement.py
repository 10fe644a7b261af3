"""Servers in Ray actors: the only file of this folder that knows Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles_async.engines.kind import Arguments, EngineKind, Result, ServerHandle, ServerSpec
from miles_async.engines.server_process import ServerProcess
from miles_async.errors import EngineError, EngineStartError
from miles_async.runtime.nodes import NO_LABELS, alive_nodes, describe_nodes
from miles_async.runtime.ray_errors import why_gone

_STOP_SECONDS = 10.0


class RayServers:
    """A ``LaunchServer``: each server in its own Ray actor, which holds the server's GPUs."""

    def __init__(self, kind: EngineKind, spec: ServerSpec, labels: Mapping[str, str] = NO_LABELS) -> None:
        """``labels``: of the nodes that may have engines."""
        self._kind = kind
        self._spec = spec
        self._labels = labels

    def __call__(self, engine_index: int, incarnation: int) -> ServerHandle:
        return _RayServer(self._kind, self._spec, self._labels, engine_index, incarnation)


class _RayServer:
    def __init__(
        self, kind: EngineKind, spec: ServerSpec, labels: Mapping[str, str], engine_index: int, incarnation: int
    ) -> None:
        self._spec = spec
        self._arguments = (kind, spec, engine_index, incarnation)
        self._engine_index = engine_index
        self._labels = labels
        self._gpus = spec.tensor_parallel_size if spec.device == "cuda" else 0
        self._actor: Any = None

    async def start(self) -> str:
        import ray

        place = await asyncio.to_thread(self._place)
        actor = ray.remote(ServerProcess).options(num_cpus=0, num_gpus=self._gpus, **place)
        self._actor = actor.remote(*self._arguments)
        # The actor keeps its own deadline; ours is for Ray, which waits for free resources without end.
        deadline = self._spec.start_timeout + 60
        try:
            async with asyncio.timeout(deadline):
                return await self._actor.start.remote()
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EngineStartError):
                raise error.cause from None
            raise EngineStartError(f"engine actor failed: {error}") from error
        except ray.exceptions.RayError as error:
            raise EngineStartError(f"engine actor died while it started: {why_gone(error)}") from error
        except TimeoutError:
            raise EngineStartError(
                f"Ray did not place the engine within {deadline:g} s: it needs {self._gpus} GPUs, and this "
                f"cluster has {ray.cluster_resources()} (--rollout-num-gpus, --actor-num-gpus-per-node)"
            ) from None

    def _place(self) -> dict[str, object]:
        """Options that choose the node. Without GPUs there is nothing by which Ray could spread engines, so they take
        turns.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._gpus:
            return {"label_selector": dict(self._labels)}
        nodes = alive_nodes(self._labels)
        if not nodes:
            raise EngineStartError(
                f"expected nodes with the labels {dict(self._labels)} (--rollout-node-labels) for engines, found "
                f"{describe_nodes()}"
            )
        node = nodes[self._engine_index % len(nodes)]
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)}

    async def wait_exit(self) -> str:
        import ray

        try:
            return await self._actor.wait_exit.remote()
        except ray.exceptions.RayError as error:
            return f"its actor is gone: {why_gone(error)}"

    async def on_host(
        self, function: Callable[[Path, *Arguments], Result], room: int, *arguments: *Arguments
    ) -> Result:
        import ray

        if self._actor is None:
            raise EngineError("it was stopped")
        try:
            return await self._actor.on_host.remote(function, room, *arguments)  # Ray resolves references here
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, EngineError) else EngineError(str(error)) from None
        except ray.exceptions.RayError as error:
            raise EngineError(f"its actor is gone: {why_gone(error)}") from error

    async def stop(self) -> None:
        import ray

        if self._actor is None:
            return
        actor, self._actor = self._actor, None
        with suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await actor.stop.remote()
        ray.kill(actor, no_restart=True)  # and with it, by PR_SET_PDEATHSIG, whatever stop left
