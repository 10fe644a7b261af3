"""Boundaries between rooms: protocols of the controller, the two sides and the engines.

A narrow protocol with a single consumer stands beside that consumer, such as ``controller.Publisher``.
``controller.py`` sees protocols only; the wiring chooses the implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple, cast, runtime_checkable

from miles_async.api import Metrics
from miles_async.arguments.weights import PauseMode
from miles_async.types import (
    CanaryScore,
    EngineLoad,
    FleetMembers,
    GenerateRequest,
    Generation,
    GroupBackend,
    HeldWeights,
    Incarnation,
    Int32,
    JsonObject,
    PreparedBatch,
    Prompt,
    RolloutStats,
    StagedWeights,
    TensorMeta,
    TensorShare,
)

Ts = TypeVarTuple("Ts")
T = TypeVar("T")
Result = TypeVar("Result")
Half = TypeVar("Half", covariant=True)

TokenVersions = Callable[[object, object, int], Int32]
"""(spans as reported or None, version label as reported or None, number of output tokens) → version of each token, by
``staleness.versions.token_versions``. Raises VersionUnknownError.
"""


@runtime_checkable
class PromptSource(Protocol):
    """An endless stream of prompts with a cursor. ``take`` never returns fewer than asked for."""

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next ``count`` prompts as (epoch, prompt). Raises DataError naming file and line."""
        ...

    def state(self) -> JsonObject:
        """The cursor, JSON-serializable."""
        ...

    def restore(self, state: JsonObject) -> None: ...


class SavedSide(Protocol):
    """State saved in a checkpoint together with the trainer's."""

    async def snapshot(self) -> None:
        """Keep the current state for :meth:`save`. Quick: nothing is copied or written."""
        ...

    async def save(self, directory: Path) -> Mapping[str, str]:
        """Write the last snapshot while everything else continues. Return digests of its files, by path."""
        ...

    async def load(
        self,
        directory: Path,
        *,
        step: int,
        version: int,
        readmissions: Mapping[str, Sequence[str]],
        accepted: Sequence[str] = (),
    ) -> None:
        """Restore a checkpoint that was taken after ``step`` trained steps, with ``version`` visible.

        ``accepted``: changes of the model since then that ``--load-anyway`` accepted, for the ledger.
        """
        ...


class RolloutSide(SavedSide, Protocol):
    """The rollout manager as the controller sees it. All waits end by deadline, error or close."""

    async def run(self) -> None:
        """Dispatch and supervise until :meth:`close`; raises the first error of the rollout side."""
        ...

    async def next_batch(self, target_version: int) -> PreparedBatch:
        """Cut one batch for the version the optimizer will step from (C1). Waits until there is one."""
        ...

    async def trained(self, batch_id: int) -> None:
        """Record that the optimizer has stepped with this batch: its groups end as ``trained`` (C2)."""
        ...

    async def commit_version(self, version: int) -> None:
        """Mark ``version`` visible (again, if the step was not published) and free the slots of trained groups."""
        ...

    async def wait_for_joining(self) -> None:
        """Wait until an engine needs weights."""
        ...

    async def evaluate(self) -> Metrics: ...

    async def describe(self) -> str:
        """Describe all waits, in lines for ``stall.txt`` (C10)."""
        ...

    async def count_stale(self, version: int) -> int:
        """Attempts outside a batch that publishing ``version`` now would make too old, or might (C5)."""
        ...

    async def close(self) -> None:
        """End what is in flight as cancelled; :meth:`run` returns."""
        ...

    async def last_stats(self) -> RolloutStats:
        """:meth:`close`, and the statistics when everything has ended."""
        ...

    async def canary(self) -> tuple[int, ...]:
        """Tokens of the text that engines and trainer score at every publication: the run's first prompts."""
        ...

    async def scale(self, group: str, engines: int) -> None:
        """Change the number of engines in a group. Raises ConfigurationError."""
        ...

    async def engines(self) -> str:
        """Describe all engines and their states in one line."""
        ...

    async def stop(self) -> None:
        """Stop engines and router."""
        ...


class SenderHandle(Protocol[Half]):
    """A sending rank's half of the weight transport, as the driver calls it."""

    async def call(self, method: Callable[[Half, *Ts], Result], *arguments: *Ts) -> Result:
        """Run ``method``, named by the protocol that the rank's half implements, in the rank's process.

        Training continues meanwhile. Calls to one sender run in one thread, in order; calls through a handle for
        repairs run in another thread, so that a repair that hangs delays no delivery.

        >>> await sender.call(WeightSender.pin, 12)
        """
        ...


class WeightSenders(Protocol):
    """The sending ranks as the publisher and the transports see them."""

    def sender(self, index: int, *, repair: bool = False) -> SenderHandle[Any]:
        """Handle of one sending rank, whose half depends on the transport; ``repair``: for repairs, which overlap
        deliveries.
        """
        ...


class TrainerSide(WeightSenders, Protocol):
    """The trainer's ranks as the controller and the publisher see them."""

    async def start(self) -> None: ...

    async def train(self, shards: Sequence[object]) -> Metrics:
        """Train one rollout step: all its optimizer steps on all ranks."""
        ...

    async def copy_weights(self, version: int) -> None:
        """Export to memory of the sending ranks and score the canary. Collective over all ranks."""
        ...

    async def stage_weights(self, version: int) -> StagedWeights:
        """Write the latest copy to files on the sending ranks while training continues."""
        ...

    async def save(self, directory: Path) -> Mapping[str, str]:
        """Return digests by path below ``directory``: of the files that were digested while they were written."""
        ...

    async def stage_save(self, directory: Path) -> None:
        """Copy what :meth:`save` would write, for :meth:`write_save`; return once training may resume."""
        ...

    async def write_save(self) -> Mapping[str, str]:
        """Write the staged copy while training continues; return as :meth:`save`. Raises CheckpointError, which leaves
        the ranks as they are.
        """
        ...

    async def save_hf(self, directory: Path) -> None:
        """Export weights, config and tokenizer as Hugging Face files."""
        ...

    async def load(self, directory: Path, *, step: int) -> None:
        """Restore what was saved after ``step`` trained steps. Raises CheckpointError."""
        ...

    async def digests(self, directory: Path, sizes: Mapping[str, int]) -> Mapping[str, str]:
        """Digests of files below ``directory``, read by all ranks side by side. ``sizes``: their bytes, by path.

        Raises CheckpointError.
        """
        ...

    async def stop(self) -> None: ...


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
        ``experts``: ask for the experts of the tokens from ``experts_from`` on.
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
        first_rank: int,
        group_name: str,
        address: str,
        port: int,
        world_size: int,
        backend: GroupBackend,
        timeout: float,
    ) -> None:
        """Join a torch process group with the server's ranks, which are ``first_rank`` and those after it."""
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


class EngineFleet(Protocol):
    """The engines as the publisher and the transports see them.

    An engine is named by its incarnation: if it has been restarted, even while it was called, the result is an error
    and nothing of the call counts for the new start.
    """

    async def members(self) -> FleetMembers: ...

    async def call(
        self,
        engines: Sequence[Incarnation],
        operation: Callable[[InferenceServer, str, *Ts, float], Coroutine[Any, Any, Result]],
        *arguments: *Ts,
        brief: bool = False,
    ) -> Mapping[Incarnation, Result | Exception]:
        """Run an operation on these engines concurrently, each with the deadline that the operation has.

        Returns what each engine answers, or the error that it meets; raises only for bugs in the fleet. ``brief``: wait
        a few seconds at most, since a healthy engine needs no time or the answer is not needed.

        ``pause`` also holds new requests back on the client until ``resume``. An operation that replaces weights makes
        them unverified until :meth:`admit`: no request goes out before :meth:`begin_trial`, and no answer counts.

        >>> errors = await fleet.call(engines, InferenceServer.pause, "retract")
        """
        ...

    async def stream_sent(self, engines: Sequence[Incarnation], *, broken: bool) -> None:
        """Start the deadline of these engines' ``receive_stream``: its senders have finished. ``broken``: with an
        error, which engines that are alive meet, too.
        """
        ...

    async def on_host(
        self,
        engines: Sequence[Incarnation],
        function: Callable[[Path, *Ts], Result],
        *arguments: *Ts,
        room: int = 0,
    ) -> Mapping[Incarnation, Result | Exception]:
        """Call ``function(directory, *arguments)`` in a thread on each engine's host; return as :meth:`call` does.

        ``directory`` belongs to this start of the engine and is removed with it; it is in memory if there is ``room``
        for that many bytes, else on disk. References to objects in ``arguments`` are resolved on the host.
        """
        ...

    async def begin_trial(self, engines: Sequence[Incarnation], version: int) -> None:
        """Send new requests, under ``version``, to these engines if they serve. Answers are held back on the client
        until :meth:`admit`, and discarded if the engine is fenced instead.
        """
        ...

    async def admit(self, engines: Sequence[Incarnation], version: int) -> EngineErrors:
        """Make (or keep) engines routable that hold ``version``, verified, unless they claim another version."""
        ...

    async def fence(self, engines: Sequence[Incarnation], reason: str) -> None:
        """Take engines out of the router, end their requests and restart them; they come back as joining. No-op for
        engines that have been restarted already.
        """
        ...


@dataclass(frozen=True, slots=True)
class PerEngine(Generic[T]):
    """An argument of :meth:`EngineFleet.call` with a value for each engine."""

    values: Mapping[Incarnation, T]


def per_engine(values: Mapping[Incarnation, T]) -> T:
    """Pass each engine its own value: a :class:`PerEngine`, typed as what the operation takes.

    >>> await fleet.call(engines, InferenceServer.load_files, per_engine(directories), version, True)
    """
    return cast(T, PerEngine(values))


def arguments_of(engine: Incarnation, arguments: Iterable[object]) -> list[object]:
    """Arguments of a call as ``engine`` gets them."""
    return [each.values[engine] if isinstance(each, PerEngine) else each for each in arguments]


EngineErrors = Mapping[Incarnation, Exception | None]


class WeightTransport(Protocol):
    """The driver's half of a weight transport: brings staged weights to engines. The other half is a WeightSender."""

    sent_fraction: float  # bytes sent to each engine in the last delivery ÷ bytes of the weights; mean over engines

    async def prepare(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Do what can be done while the engines generate. An error means that its engine is to blame."""
        ...

    async def deliver(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> EngineErrors:
        """Bring the weights to paused engines, which were all prepared. An error means that its engine is to blame;
        engines without one hold all weights.
        """
        ...

    async def close(self) -> None:
        """Release what is kept between deliveries, such as process groups."""
        ...


class WeightSender(Protocol):
    """The sending rank's half of a weight transport. It keeps the newest staged versions, and pinned ones.

    A driver's half that calls more extends this protocol.
    """

    def copy(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copy this sender's share of all exported (HF name, torch tensor) to host memory. Training waits for it."""
        ...

    def stage(self, version: int) -> StagedWeights:
        """Write the latest copy to files, in another thread; the canary is added later."""
        ...

    def pin(self, version: int) -> None:
        """Keep the files of ``version``, however many versions are staged after it."""
        ...

    def unpin(self, version: int) -> None:
        """Undo :meth:`pin`: the next staged version may replace it."""
        ...

    def close(self) -> None:
        """Remove the files, leave process groups; idempotent."""
        ...
