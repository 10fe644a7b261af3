"""A kind of inference server: how its processes are started, and its protocol.

``engines/sglang`` is one. Another is a sibling folder with an :class:`EngineKind`, which ``wiring/engines.py`` names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

import msgspec

from miles_async.arguments.cluster import Device
from miles_async.engines.http import Http
from miles_async.runtime.cluster.node_files import NodeFiles
from miles_async.runtime.environment import SecretEnvironment
from miles_async.runtime.network.addresses import LOCAL, Network
from miles_async.runtime.network.keys import EngineKeys
from miles_async.seams import InferenceServer
from miles_async.types import JsonObject

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the server processes of a group; each kind of server makes its own flags of them."""

    group: str = "engine"
    model_path: str
    trust_remote_code: bool = False  # of the tokenizer in it
    device: Device
    dtype: str  # "float32", "bfloat16", ...; must be the trainer's for log-probs to agree
    tensor_parallel_size: int = 1  # GPUs, or on CPU processes, per engine
    gpus: tuple[str, ...] = ()  # shared with trainer ranks of its node; (): assigned by Ray
    nodes: int = 1  # over which these are spread evenly; the first one serves
    random_seed: int = 0  # engine i samples with random_seed + i
    start_timeout: float = 600.0  # seconds
    network: Network = LOCAL
    log_dir: str = "logs"
    longest_sample: int = 2048  # tokens of prompt and response
    concurrency: int = 64  # requests that it is given at once
    engines_on_host: int = 1  # that share its memory, on CPU
    held_weights: bool = False  # it can say what its model holds (--verify-weights full, sample)
    model_overrides: JsonObject = {}  # fields of config.json that the server takes in place of the model's
    dummy_weights: bool = False  # it starts with random weights, which a publication replaces
    weight_version: int | None = None  # of the weights that it starts with, if they are to be trained on
    grammars: bool = False  # requests may have one (response_format and tool_choice of agents)
    routed_experts: bool = False  # requests may ask for them (--use-rollout-routing-replay)
    weight_group_seconds: float | None = None  # waiting for other members of a process group; None: the server's own
    publication_seconds: float = 0.0  # that a publication may take, during which the server generates nothing
    keys: EngineKeys | None = None  # of its HTTP doors; None on loopback only
    secrets: SecretEnvironment = {}  # variables of its process
    files: NodeFiles = NodeFiles()  # that its node has to have
    fork_server: Path | None = None  # socket of the process that has imported what servers need, if its node has one
    extra: tuple[str, ...] = ()  # arguments of the server itself, which come last and win


class ServerHandle(Protocol):
    """One start of one engine, wherever it runs."""

    async def start(self) -> str:
        """Start the server, wait until it is up and return its URL.

        Raises EngineStartError with its last log lines, ConfigurationError if its node lacks files.
        """
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


class ServerCommand(Protocol):
    """Makes the arguments of the Python interpreter that start a server."""

    def __call__(
        self, spec: ServerSpec, host: str, port: int, rendezvous: tuple[str, int], seed: int, node: int
    ) -> list[str]:
        """Command of the server, which must listen at ``host`` and ``port``. ``rendezvous``: where its own ranks meet,
        on all its nodes; ``node``: index of this node; only the first one serves.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKind:
    """An inference server that runs can use; ``server_process.py`` starts and supervises it."""

    name: str  # in messages
    command: ServerCommand
    environment: Callable[[ServerSpec], dict[str, str]]  # variables to add to our own and its keys'
    # Distances from the port where the server's ranks meet to others that it takes on the same address.
    above_rendezvous: Callable[[ServerSpec], Sequence[int]] = lambda spec: ()
    is_up: Callable[[Http, str], Awaitable[bool]]  # asked with its URL until it is
    calls: Callable[[Http], InferenceServer]  # makes the client of the servers' protocol
    streams: bool = False  # servers that we start can ``receive_stream``; else they get a call per bucket
    imports: tuple[str, ...] = ()  # modules to import once per node; servers are forked from there. (): each by itself
    own_variables: str = ""  # pattern of variables that these modules read and torch and transformers do not
