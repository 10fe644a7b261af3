"""A kind of inference server: how its processes are started, and the calls that they understand.

``engines/sglang`` is one. Another is a folder beside it, with an :class:`EngineKind` in a row of ``wiring/engines.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

import msgspec

from miles_async.arguments.cluster import Device
from miles_async.engines.http import Http
from miles_async.runtime.fork_server_process import ForkServerProcess
from miles_async.seams import InferenceServer

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the server processes of a group; each kind of server makes its own flags of them."""

    group: str = "engine"
    model_path: str
    device: Device
    dtype: str  # "float32", "bfloat16", ...; must be the trainer's for log-probs to agree
    tensor_parallel_size: int = 1  # GPUs, or on CPU processes, per engine
    random_seed: int = 0  # engine i samples with random_seed + i
    start_timeout: float = 600.0  # seconds
    single_node: bool = True  # then addresses are 127.0.0.1
    log_dir: str = "logs"
    longest_sample: int = 2048  # tokens of prompt and response
    concurrency: int = 64  # requests that it is given at once
    engines_on_host: int = 1  # that share its memory, on CPU
    held_weights: bool = False  # it can say what its model holds (--verify-weights full, sample)
    dummy_weights: bool = False  # it starts with random weights, which a publication replaces
    grammars: bool = False  # requests may have one (response_format and tool_choice of agents)
    weight_group_seconds: float | None = None  # waiting for other members of a process group; None: the server's own
    fork_server: Path | None = None  # socket of the process that has imported what servers need, if its node has one
    extra: tuple[str, ...] = ()  # arguments of the server itself, which come last and win


class ServerHandle(Protocol):
    """One start of one engine, wherever it runs."""

    async def start(self) -> str:
        """Start the server, wait until it is up and return its URL. Raises EngineStartError with its last log lines."""
        ...

    async def wait_exit(self) -> str:
        """Wait until the server ends, by itself or with its machine. Returns why, with its last log lines."""
        ...

    async def on_host(
        self, function: Callable[[Path, *Arguments], Result], room: int, *arguments: *Arguments
    ) -> Result:
        """See ``seams.EngineFleet``. Raises EngineError with what went wrong on the host."""
        ...

    async def stop(self) -> None:
        """End the server. Never raises; safe to call twice."""
        ...


class LaunchServer(Protocol):
    """Makes the handle of an engine's next start; nothing runs before ``start`` of the handle."""

    def __call__(self, engine_index: int, incarnation: int) -> ServerHandle: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKind:
    """An inference server that runs can use."""

    process: Callable[[ServerSpec, int, int], ServerHandle]
    """The class of a server process: (settings, engine index, incarnation). Ray makes actors of it."""
    calls: Callable[[Http], InferenceServer]
    """What its servers understand."""
    imports: Callable[[Path, ServerSpec, Mapping[str, str]], ForkServerProcess | None]
    """Make the process from which servers are forked: (its socket, settings of a group, variables that the servers'
    parents have beyond ours). None where servers must not be forked.
    """
