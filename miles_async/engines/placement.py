"""Where engines run: the only file of this folder that knows Ray. ``Fleet`` sees :class:`ServerHandle`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from miles_async.engines.sglang.server import EngineServer, ServerSpec
from miles_async.errors import EngineError, EngineStartError
from miles_async.runtime.ray_errors import why_gone

_STOP_SECONDS = 10.0


class ServerHandle(Protocol):
    """One start of one engine, wherever it runs."""

    async def start(self) -> str:
        """The server's URL, once it is up. Raises EngineStartError with its last log lines."""
        ...

    async def wait_exit(self) -> str:
        """Until it ends, by itself or with its machine; why, with its last log lines."""
        ...

    async def on_host(self, function: Callable[..., Any], room: int, *arguments: Any) -> Any:
        """See ``seams.EngineFleet``. Raises EngineError with what went wrong there."""
        ...

    async def stop(self) -> None:
        """End it; never raises, safe to call twice."""
        ...


class LaunchServer(Protocol):
    """How the fleet gets a new server; nothing is started before ``start`` of the handle."""

    def __call__(self, engine_index: int, incarnation: int) -> ServerHandle: ...


class RayServers:
    """Each server in its own Ray actor, which holds its GPUs (or, on CPU, ``cpus_per_engine``)."""

    def __init__(
        self, spec: ServerSpec, *, cpus_per_engine: float = 0.0, actor_options: dict[str, Any] | None = None
    ) -> None:
        """``actor_options``: more for ``ray.remote(...).options``: runtime_env, scheduling_strategy, ..."""
        self._spec = spec
        self._options: dict[str, Any] = {
            "num_cpus": cpus_per_engine,
            "num_gpus": spec.tensor_parallel_size if spec.device == "cuda" else 0,
            **(actor_options or {}),
        }

    def __call__(self, engine_index: int, incarnation: int) -> ServerHandle:
        return _RayServer(self._spec, engine_index, incarnation, self._options)


class _RayServer:
    def __init__(self, spec: ServerSpec, engine_index: int, incarnation: int, options: dict[str, Any]) -> None:
        self._spec = spec
        self._arguments = (spec, engine_index, incarnation)
        self._options = options
        self._actor: Any = None

    async def start(self) -> str:
        import ray

        self._actor = ray.remote(EngineServer).options(**self._options).remote(*self._arguments)
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
                f"Ray did not place the engine within {deadline:g} s: it needs {self._options}, and this "
                f"cluster has {ray.cluster_resources()} (--rollout-num-gpus, --actor-num-gpus-per-node)"
            ) from None

    async def wait_exit(self) -> str:
        import ray

        try:
            return await self._actor.wait_exit.remote()
        except ray.exceptions.RayError as error:
            return f"its actor is gone: {why_gone(error)}"

    async def on_host(self, function: Callable[..., Any], room: int, *arguments: Any) -> Any:
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


class LocalServers:
    """Servers as children of this process, without Ray: for tools and tests."""

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec

    def __call__(self, engine_index: int, incarnation: int) -> ServerHandle:
        return EngineServer(self._spec, engine_index, incarnation)
