"""Servers in Ray actors: the only file of this folder that knows Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from miles_async.engines.kind import Arguments, EngineKind, Result, ServerHandle, ServerSpec
from miles_async.engines.server_process import ServerProcess
from miles_async.errors import ConfigurationError, EngineError, EngineStartError, ProcessLostError
from miles_async.runtime.clock import now
from miles_async.runtime.cluster.actor_link import ActorLink, why_gone
from miles_async.runtime.cluster.call_once import CallId, CallOnce
from miles_async.runtime.cluster.nodes import NO_LABELS, Node, alive_nodes, describe_nodes
from miles_async.runtime.cluster.reservation import Reservation
from miles_async.runtime.tasks import first_of, gathered

_STOP_SECONDS = 10.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlace:
    node_ids: tuple[str, ...] = ()  # if empty or gone, Ray chooses
    gpus: tuple[tuple[str, ...], ...] = ()  # of each node, held by trainer ranks; (): any free ones


class RayServers:
    """A ``LaunchServer``: each server in its own Ray actor, which holds the server's GPUs."""

    def __init__(
        self,
        kind: EngineKind,
        spec: ServerSpec,
        labels: Mapping[str, str] = NO_LABELS,
        interpreter: str | None = None,
        places: Sequence[EnginePlace] = (),
    ) -> None:
        """``labels``: of the nodes that may have engines. ``interpreter``: command that Ray starts the actors'
        processes with; None: this process's. ``places``: nodes of the first engines, if already chosen.
        """
        self.kind = kind
        self.spec = spec
        self.nodes = _EngineNodes(labels, spec.start_timeout)
        self.process = {} if interpreter is None else {"runtime_env": {"py_executable": interpreter}}
        self.places = places

    def __call__(self, engine_index: int, incarnation: int) -> ServerHandle:
        return _RayServer(self, engine_index, incarnation)


class _EngineNodes:
    """The nodes that may have engines."""

    def __init__(self, labels: Mapping[str, str], patience: float) -> None:
        """``patience``: seconds for which all of them may be gone: restarting a machine takes minutes."""
        self.labels = labels
        self.labelled = f" labelled {dict(labels)}" if labels else ""
        self._patience = patience
        self._were_there = False  # no node ever had the labels: a mistake in the flags

    async def choose(self, engine_index: int, count: int) -> Sequence[Node]:
        """Choose the ``count`` nodes of an engine: they take turns. Raises EngineStartError if there is none."""
        deadline = now() + (self._patience if self._were_there else 0.0)
        while not (nodes := await asyncio.to_thread(alive_nodes, self.labels)):
            if now() >= deadline:
                found = await asyncio.to_thread(describe_nodes)
                raise EngineStartError(
                    f"expected nodes{self.labelled} for engines, found {found} (--rollout-node-labels)"
                )
            await asyncio.sleep(_POLL_SECONDS)
        self._were_there = True
        return [nodes[(engine_index * count + part) % len(nodes)] for part in range(count)]


class EngineActor:
    """One start of one server on one node, in an actor. Calls that its caller repeats are executed once."""

    def __init__(self, kind: EngineKind, spec: ServerSpec, engine_index: int, incarnation: int, node: int) -> None:
        self._server = ServerProcess(kind, spec, engine_index, incarnation, node)
        self._once = CallOnce()

    async def perform(self, call: CallId, method: Callable[..., Awaitable[Result]], *arguments: object) -> Result:
        """Await ``method``, a function of ServerProcess, unless ``call`` was executed before: then answer the same."""
        return await self._once.run_async(call, lambda: method(self._server, *arguments))


@dataclass(frozen=True, slots=True)
class _RemoteServer:
    """An EngineActor from outside.

    An actor that cannot be reached is called again for a while: whether its server answers HTTP decides meanwhile
    whether the engine is given up (``health.py``).
    """

    actor: Any
    link: ActorLink

    async def perform(self, method: Callable[..., Awaitable[Result]], *arguments: object) -> Result:
        return await self.link.call(lambda call: self.actor.perform.remote(call, method, *arguments))

    async def wait_exit(self) -> str:
        import ray

        try:
            return await self.perform(ServerProcess.wait_exit)
        except (ray.exceptions.RayError, ProcessLostError) as error:
            return f"its actor is gone: {why_gone(error)}"

    async def never_ends(self) -> str:
        """Wait. Raises EngineStartError if the server ends."""
        raise EngineStartError(await self.wait_exit())

    async def stop(self) -> None:
        import ray

        with suppress(ray.exceptions.RayError, ProcessLostError, TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self.perform(ServerProcess.stop)
        ray.kill(self.actor, no_restart=True)  # and with it, by PR_SET_PDEATHSIG, all processes that stop left


class _RayServer:
    """Implements ServerHandle. The parts of a server on several nodes start, and end, together."""

    def __init__(self, servers: RayServers, engine_index: int, incarnation: int) -> None:
        self._servers = servers
        self._place = place = servers.places[engine_index] if engine_index < len(servers.places) else EnginePlace()
        self._spec = spec = servers.spec
        self._engine_index, self._incarnation = engine_index, incarnation
        self._name = f"{spec.group}-{engine_index}"
        owns = spec.device == "cuda" and not place.gpus
        self._gpus = spec.tensor_parallel_size // spec.nodes if owns else 0  # on each node
        bundle, labels = {"GPU": self._gpus}, servers.nodes.labels
        self._reservation = Reservation(bundle, spec.nodes, labels, place.node_ids) if owns else None
        self._parts: list[_RemoteServer] = []  # by node
        self._hosts: list[_RemoteServer] = []  # parts with files of their own, all at one path

    async def start(self) -> str:
        import ray

        self._parts = [self._part(node, place) for node, place in enumerate(await self._places())]
        deadline = self._spec.start_timeout + 60  # of Ray, to start the actors, which keep their own
        try:
            async with asyncio.timeout(deadline):
                return await self._start(*self._parts)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EngineStartError | ConfigurationError):
                raise error.cause from None
            raise EngineStartError(f"engine actor failed: {error}") from error
        except (ray.exceptions.RayError, ProcessLostError) as error:
            raise EngineStartError(f"engine actor died while it started: {why_gone(error)}") from error
        except TimeoutError:
            raise EngineStartError(f"Ray did not start the engine's actor within {deadline:g} s") from None

    async def _start(self, first: _RemoteServer, *others: _RemoteServer) -> str:
        if not others:
            return await first.perform(ServerProcess.start)
        rendezvous = await first.perform(ServerProcess.open_rendezvous)
        await gathered(*(other.perform(ServerProcess.follow, rendezvous) for other in others))
        return await first_of(first.perform(ServerProcess.start, rendezvous), *(other.never_ends() for other in others))

    def _part(self, node: int, place: object) -> _RemoteServer:
        import ray

        gpus = self._place.gpus[node] if self._place.gpus else ()
        spec = msgspec.structs.replace(self._spec, gpus=gpus)
        options = {"num_cpus": 0, "num_gpus": self._gpus, "scheduling_strategy": place, **self._servers.process}
        own = self._servers.kind, spec, self._engine_index, self._incarnation, node
        actor = ray.remote(EngineActor).options(**options).remote(*own)
        return _RemoteServer(actor, ActorLink(f"the actor of {self._name}" + (f" on node {node}" if node else "")))

    async def _places(self) -> Sequence[object]:
        """Choose the nodes: some with free GPUs, which are reserved. Without GPUs there is nothing by which Ray could
        spread engines, so they take turns.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        count = self._spec.nodes
        if self._reservation is not None:
            if not await self._reservation.reserve(self._spec.start_timeout):
                raise EngineStartError(
                    f"{self._name}: Ray did not find {count} node(s){self._servers.nodes.labelled} with {self._gpus} "
                    f"free GPUs each within {self._spec.start_timeout:g} s (--engine-start-timeout); the cluster has "
                    f"{await asyncio.to_thread(describe_nodes)} (--rollout-num-gpus, --rollout-num-gpus-per-engine)"
                )
            return [self._reservation.on(node) for node in range(count)]
        if self._place.gpus:
            node_ids = self._place.node_ids
        else:
            node_ids = tuple(node.node_id for node in await self._servers.nodes.choose(self._engine_index, count))
        return [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in node_ids]

    async def wait_exit(self) -> str:
        return await first_of(*(part.wait_exit() for part in self._parts))

    async def on_host(
        self, function: Callable[[Path, *Arguments], Result], room: int, *arguments: *Arguments
    ) -> Result:
        """On each node; return None if one does, else the first one's answer."""
        import ray

        if not self._parts:
            raise EngineError("it was stopped")
        try:  # Ray resolves references among the arguments on the way
            hosts = self._hosts or await self._choose_hosts(room)
            answers = await gathered(
                *(host.perform(ServerProcess.on_host, function, room, *arguments) for host in hosts)
            )
            return min(answers, key=lambda answer: answer is not None)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, EngineError) else EngineError(str(error)) from None
        except (ray.exceptions.RayError, ProcessLostError) as error:
            raise EngineError(f"its actor is gone: {why_gone(error)}") from error

    async def _choose_hosts(self, room: int) -> Sequence[_RemoteServer]:
        """The ranks of all nodes are told one path to load from."""
        first, *others = self._parts
        made: list[Path | None] = []
        if others:
            place = await first.perform(ServerProcess.host_directory, room)
            made = await gathered(*(other.perform(ServerProcess.host_directory, room, place) for other in others))
        self._hosts = [first, *(other for other, path in zip(others, made, strict=True) if path is not None)]
        return self._hosts

    async def stop(self) -> None:
        parts, self._parts = self._parts, []
        await asyncio.gather(*(part.stop() for part in parts))
        if self._reservation is not None:
            self._reservation.release()
