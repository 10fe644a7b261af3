"""The fork servers of a run: which processes on this node are forked, and their imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.cluster import Device
from miles_async.arguments.server_groups import server_groups
from miles_async.engines.placement import EngineActor
from miles_async.engines.server_process import fork_server_of
from miles_async.runtime.processes.fork_server_process import ForkServer
from miles_async.trainer.placement import RankResources
from miles_async.wiring.engines import KIND, ForkedEngines, server_spec


@dataclass(frozen=True, kw_only=True, slots=True)
class RunForkServers:
    """A fork server per kind of process; None where such processes start by themselves."""

    engines: ForkServer | None = None  # inference servers
    ranks: ForkServer | None = None
    actors: ForkServer | None = None  # the rollout process and the engines' supervisors

    def __iter__(self) -> Iterator[ForkServer]:
        return (server for server in (self.engines, self.ranks, self.actors) if server is not None)

    def interpreter(self, title: str) -> str | None:
        """Command that Ray starts an actor's process with, to be named ``title``; None: this process's."""
        return self.actors.interpreter(title) if self.actors is not None else None

    def for_engines(self) -> ForkedEngines:
        """Fork-server settings for the rollout process."""
        return ForkedEngines(
            servers=self.engines.path if self.engines is not None else None,
            interpreter=self.interpreter(f"ray::{EngineActor.__name__}"),
        )


def fork_servers(
    arguments: Arguments, run_dir: Path, device: Device, sockets: Path, environment: Mapping[str, str]
) -> RunForkServers:
    """Describe the fork servers of a run. ``environment``: what Ray's workers have beyond ours.

    There are none on CUDA, which does not survive a fork. Nor do threads, which imports start unless OMP_NUM_THREADS
    is 1.
    In a cluster only engines are forked, from their server on this node: Ray's own processes have another environment
    there.
    """
    if device != "cpu" or environment.get("OMP_NUM_THREADS") != "1":
        return RunForkServers()
    logs, sides = run_dir / "logs", arguments.sides
    engines = None if sides == "trainer" else _engine_server(arguments, device, logs, sockets / "engines", environment)
    if arguments.cluster.ray_address is not None:
        return RunForkServers(engines=engines)
    ranks = ForkServer(
        path=sockets / "ranks",
        modules=("miles_async.backends.megatron.imports", "miles_async.weights.staging"),
        environment=RankResources.for_device(device, environment).env,
        log_path=logs / "rank_imports.log",
        own="CUDA_VISIBLE_DEVICES",
    )
    actors = ForkServer(
        path=sockets / "actors",
        modules=("miles_async.wiring.actor_imports",),
        environment=environment,
        log_path=logs / "actor_imports.log",
    )
    forks_ranks = sides != "rollout" and arguments.model.train_backend == "megatron"
    return RunForkServers(
        engines=engines, ranks=ranks if forks_ranks else None, actors=None if sides == "trainer" else actors
    )


def _engine_server(
    arguments: Arguments, device: Device, logs: Path, socket: Path, environment: Mapping[str, str]
) -> ForkServer | None:
    groups = [group for group in server_groups(arguments) if not group.external]
    if not groups:
        return None
    return fork_server_of(KIND, server_spec(arguments, groups[0], logs, device), socket, environment)
