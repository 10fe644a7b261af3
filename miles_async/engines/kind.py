"""A kind of inference server: how its processes are started, and the calls that they understand.

``engines/sglang`` is one. Another is a folder beside it with an :class:`EngineKind`, which ``wiring/engines.py`` names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

import msgspec

from miles_async.arguments.cluster import Device
from miles_async.arguments.weights import PauseMode
from miles_async.engines.http import Http
from miles_async.runtime.cluster.node_files import NodeFiles
from miles_async.runtime.environment import SecretEnvironment
from miles_async.runtime.network.addresses import LOCAL, Network
from miles_async.runtime.network.keys import EngineKeys
from miles_async.types import (
    CanaryScore,
    EngineLoad,
    GenerateRequest,
    Generation,
    GroupBackend,
    HeldWeights,
    Int32,
    TensorMeta,
    TensorShare,
)

TokenVersions = Callable[[object, object, int], Int32]
"""(spans as reported or None, version label as reported or None, number of output tokens) → version of each token, by
``staleness.versions.token_versions``. Raises VersionUnknownError.
"""

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
    gpus: tuple[str, ...] = ()  # to use, of a node whose trainer ranks use them too; (): those that Ray gives it
    nodes: int = 1  # over which these are spread evenly; the first one serves
    random_seed: int = 0  # engine i samples with random_seed + i
    start_timeout: float = 600.0  # seconds
    network: Network = LOCAL
    log_dir: str = "logs"
    longest_sample: int = 2048  # tokens of prompt and response
    concurrency: int = 64  # requests that it is given at once
    engines_on_host: int = 1  # that share its memory, on CPU
    held_weights: bool = False  # it can say what its model holds (--verify-weights full, sample)
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


class InferenceServer(Protocol):
    """One kind of inference server (``engines/sglang``): the requests that a run sends to such a server, and what its
    answers mean.

    Generation goes through the router, so only its path, body and answer are described here. Every other method calls
    the server at ``url`` directly and raises EngineError with the server's own words, EngineTimeoutError if there is no
    answer within ``timeout`` seconds.
    """

    generate_path: str  # of generation requests, such as "/generate"

    def encode(self, request: GenerateRequest, *, request_id: str, version: int, experts: bool) -> bytes:
        """Body of a generation request. It must not reuse cached prefixes of requests with another ``version``.
        ``experts``: it asks for those of the tokens from ``experts_from`` on.
        """
        ...

    def decode(self, body: bytes, content_type: str, url: str, versions: TokenVersions) -> Generation:
        """Read the answer to a generation request. Raises TransientEngineError, naming ``url``, if it is unusable, and
        what ``versions`` raises.

        ``versions``: makes ``weight_versions`` of what the server reports. ``engines`` is left to the caller, and
        ``routed_experts`` may be flat.
        """
        ...

    async def abort(self, url: str, request_id: str, timeout: float) -> None:
        """End one request. No-op if the server does not have it."""
        ...

    async def abort_all(self, url: str, timeout: float) -> None: ...

    # State
    async def weight_version(self, url: str, timeout: float) -> str:
        """Version of the weights that the server claims to hold. Answered at once, paused or not."""
        ...

    async def probe(self, url: str, timeout: float) -> int:
        """Wait until all of the server has answered, paused or not. Returns the number of tokens of one request that a
        forward pass may yield: 1 without speculative decoding.
        """
        ...

    async def make_progress(self, url: str, timeout: float) -> None:
        """Wait until a token was generated after this call; an idle server generates one for it. Not while paused."""
        ...

    async def load(self, url: str, timeout: float) -> EngineLoad: ...

    async def score(self, url: str, tokens: Sequence[int], timeout: float, *, first: int = 1) -> CanaryScore:
        """Log-probs of tokens[first:] at temperature 1, computed without cached prefixes beyond those before ``first``.
        Not while paused. Raises RequestRejectedError for tokens that the server cannot score.
        """
        ...

    async def report_weights(self, url: str, share: TensorShare, timeout: float) -> str:
        """Have the server write a report of the weights that it holds, with digests of a share of them. Returns the
        report's fingerprint, which is the same for servers that report the same.
        """
        ...

    async def held_weights(self, url: str, report: str, timeout: float) -> HeldWeights:
        """Read the server's last report. Raises EngineError if its fingerprint is not ``report``."""
        ...

    # Publication: pause → weights by one of the ways below → resume.
    async def pause(self, url: str, mode: PauseMode, timeout: float) -> None: ...

    async def resume(self, url: str, timeout: float) -> None: ...

    async def flush_cache(self, url: str, timeout: float) -> None:
        """Forget all cached prefixes. Raises EngineError while requests use them."""
        ...

    async def release_memory(self, url: str, timeout: float) -> None:
        """Free the GPU's memory while the server is paused: weights and cache are lost."""
        ...

    async def retake_memory(self, url: str, timeout: float) -> None:
        """Undo :meth:`release_memory`, with any weights: it generates after the next publication."""
        ...

    async def join_group(
        self,
        url: str,
        *,
        group_name: str,
        address: str,
        port: int,
        first_rank: int,
        world_size: int,
        backend: GroupBackend,
        timeout: float,
    ) -> None:
        """Join a process group of torch's with the server's ranks, from ``first_rank`` on."""
        ...

    async def leave_group(self, url: str, group_name: str, timeout: float) -> None: ...

    async def receive_stream(
        self, url: str, group_names: Sequence[str], version: int, flush_cache: bool, timeout: float
    ) -> None:
        """Receive and load, as one update, what the senders (rank 0) of these process groups send. Each of them first
        announces its buckets, by broadcasts of an int64 and as many bytes of MessagePack (``StagedWeights.buckets``).
        Then each bucket is one uint8 tensor: over NCCL a broadcast, over gloo sent to rank 1 with tag 0, which passes
        it on to the others. Buckets have to be received in the order of their indices. Only for
        ``EngineKind.streams``.
        """
        ...

    async def begin_update(self, url: str, timeout: float) -> None: ...

    async def receive_bucket(
        self,
        url: str,
        group_name: str,
        tensors: Sequence[TensorMeta],
        version: int,
        flush_cache: bool,
        timeout: float,
    ) -> None:
        """Receive one broadcast with the bytes of ``tensors``, one after another."""
        ...

    async def receive_handles(
        self, url: str, handles: str, ranks: int, version: int, flush_cache: bool, timeout: float
    ) -> None:
        """Load one bucket from device memory that the server's ``ranks`` share with the sender."""
        ...

    async def end_update(self, url: str, timeout: float) -> None:
        """Post-process the weights received since :meth:`begin_update`."""
        ...

    async def load_files(self, url: str, directory: str, version: int, flush_cache: bool, timeout: float) -> None:
        """Replace the tensors of all safetensors files of ``directory``, which is on the server's host. Needs no
        :meth:`begin_update` and :meth:`end_update`.
        """
        ...


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
    environment: Callable[[ServerSpec], dict[str, str]]  # variables to add to our own; those of its keys come on top
    is_up: Callable[[Http, str], Awaitable[bool]]  # asked with its URL until it is
    calls: Callable[[Http], InferenceServer]  # makes the client of the servers' protocol
    streams: bool = False  # servers that we start can ``receive_stream``; else they get a call per bucket
    imports: tuple[str, ...] = ()  # modules to import once per node; servers are forked from there. (): each by itself
    own_variables: str = ""  # pattern of variables that these modules read and torch and transformers do not
