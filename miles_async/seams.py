"""Boundaries between rooms: protocols of the controller, the two sides and the engines.

A narrow protocol with a single consumer stands beside that consumer, such as ``controller.Publisher``.
``controller.py`` sees protocols only; the wiring chooses the implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, TypeVarTuple, runtime_checkable

from miles_async.api import Metrics
from miles_async.arguments.weights import PauseMode
from miles_async.types import (
    CanaryScore,
    CollectedSession,
    EngineLoad,
    FleetMembers,
    GroupBackend,
    HeldWeights,
    Incarnation,
    JsonObject,
    OpenSession,
    PreparedBatch,
    Prompt,
    RolloutStats,
    StagedWeights,
    TensorMeta,
    TensorShare,
)

Ts = TypeVarTuple("Ts")
Answer = TypeVar("Answer")
Half = TypeVar("Half", covariant=True)


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


class EngineLoads(Protocol):
    """Number and load of the engines that generate; the dispatcher's concurrency follows it."""

    async def serving(self, other_than: int) -> int:
        """Wait until the number of serving engines is not ``other_than``, and return it."""
        ...

    async def loads(self) -> Mapping[str, EngineLoad]:
        """Load of each engine that takes requests, by id. Engines that do not answer within seconds are left out."""
        ...


class Sessions(Protocol):
    """Source of sessions for agents: one conversation each, at a URL of its own."""

    async def open(self, routing_key: str) -> OpenSession:
        """Raises TransientEngineError if the session server is gone."""
        ...

    async def collect(self, session: OpenSession) -> CollectedSession:
        """End a session and take its trajectory. Raises TransientEngineError if it is lost."""
        ...

    async def abandon(self, session: OpenSession) -> None:
        """End a session whose trajectory is not wanted."""
        ...


class SavedSide(Protocol):
    """State saved in a checkpoint beside the trainer's."""

    async def snapshot(self) -> None:
        """Keep the current state for :meth:`save`. Quick: nothing is copied or written."""
        ...

    async def save(self, directory: Path) -> Mapping[str, str]:
        """Write the last snapshot while everything else goes on. Return digests of its files, by path."""
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
        """Describe who waits for whom, in lines for ``stall.txt`` (C10)."""
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

    async def call(self, method: Callable[[Half, *Ts], Answer], *arguments: *Ts) -> Answer:
        """Run ``method``, named by the protocol that the rank's half implements, in the rank's process.

        Training goes on meanwhile. Calls to one sender run in one thread, in the order in which they were made; calls
        through a handle for repairs run in another thread, so that a repair that hangs delays no delivery.

        >>> await sender.call(WeightSender.pin, 12)
        """
        ...


class WeightSenders(Protocol):
    """The sending ranks as the publisher and the transports see them."""

    def sender(self, index: int, *, repair: bool = False) -> SenderHandle[Any]:
        """Handle of one sending rank. Its half is the one that the run's transport makes, hence ``Any``.

        ``repair``: for repairs, which run beside deliveries.
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
        """Write the latest copy to files on the sending ranks. Training goes on meanwhile."""
        ...

    async def save(self, directory: Path) -> Mapping[str, str]:
        """Return digests by path below ``directory``: of the files that were digested while they were written."""
        ...

    async def stage_save(self, directory: Path) -> None:
        """Copy what :meth:`save` would write, for :meth:`write_save`; return once training may go on."""
        ...

    async def write_save(self) -> Mapping[str, str]:
        """Write the staged copy while training goes on; return as :meth:`save`. Raises CheckpointError, which leaves
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


class EngineFleet(Protocol):
    """The engines as the publisher and the transports see them. Every call fans out to the named engines concurrently
    and returns, per engine, None (or what was asked for) or the error that it met; it raises only for its own bugs.

    An engine is named by its incarnation: if it has been restarted, even while it was called, the result is an error
    and nothing of the call counts for the new start.
    """

    async def members(self) -> FleetMembers: ...

    async def probe(self, engines: Sequence[Incarnation]) -> EngineErrors:
        """Ask each engine down to its schedulers; those that do not answer soon are dead or hang."""
        ...

    async def weight_versions(self, engines: Sequence[Incarnation]) -> Mapping[Incarnation, str | Exception]:
        """Version that each engine claims to hold: a number, or "default" before its first publication."""
        ...

    async def pause(self, engines: Sequence[Incarnation], mode: PauseMode) -> EngineErrors:
        """Pause the engines and hold new requests back on the client, until :meth:`resume`."""
        ...

    async def flush_cache(self, engines: Sequence[Incarnation]) -> EngineErrors: ...

    async def resume(self, engines: Sequence[Incarnation]) -> EngineErrors: ...

    async def release_memory(self, engines: Sequence[Incarnation]) -> EngineErrors:
        """Free the GPUs of paused engines until :meth:`retake_memory`, after which they need a publication."""
        ...

    async def retake_memory(self, engines: Sequence[Incarnation]) -> EngineErrors: ...

    async def score(
        self, engines: Sequence[Incarnation], tokens: Sequence[int]
    ) -> Mapping[Incarnation, CanaryScore | Exception]: ...

    async def held_weights(
        self, engines: Sequence[Incarnation], share: TensorShare
    ) -> Mapping[Incarnation, HeldWeights | Exception]:
        """Report what each engine holds while it is paused, with digests of a share of it. Engines that hold the same
        may share the object.
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

    # Ways for weights to reach a paused engine, whose weights count as unverified from the first of these calls until
    # ``admit``. Weights received between begin and end are post-processed at the end, loaded files at once.
    async def connect(
        self,
        engines: Sequence[Incarnation],
        group_name: str,
        address: str,
        port: int,
        world_size: int,
        backend: GroupBackend,
    ) -> EngineErrors:
        """Join a process group as ranks 1.. in the order given; tensor-parallel engines take several ranks."""
        ...

    async def disconnect(self, engines: Sequence[Incarnation], group_name: str) -> EngineErrors: ...

    async def receive_stream(
        self, engines: Sequence[Incarnation], group_names: Sequence[str], version: int, flush_cache: bool
    ) -> EngineErrors:
        """Receive all that the senders of these process groups announce and send, and load it, as one update. Not for
        engines that are ``FleetMembers.bucketwise``.

        Over NCCL every bucket is a broadcast. Over gloo it is sent to rank 1 with tag 0, and the others get it from
        there.

        Engines have the deadline of a call from :meth:`stream_sent` on.
        """
        ...

    async def stream_sent(self, group_names: Sequence[str], *, broken: bool) -> None:
        """The senders are through with what :meth:`receive_stream` receives. ``broken``: by an error, which engines
        that are alive meet, too.
        """
        ...

    async def begin_update(self, engines: Sequence[Incarnation]) -> EngineErrors: ...

    async def receive_bucket(
        self,
        engines: Sequence[Incarnation],
        group_name: str,
        tensors: Sequence[TensorMeta],
        version: int,
        flush_cache: bool,
    ) -> EngineErrors:
        """Receive one broadcast: the bytes of ``tensors``, one after another."""
        ...

    async def receive_handles(
        self, engines: Sequence[Incarnation], handles: str, version: int, flush_cache: bool
    ) -> EngineErrors:
        """Load one bucket from device memory that the engine shares with its sender, who makes ``handles``."""
        ...

    async def end_update(self, engines: Sequence[Incarnation], *, abandon: bool = False) -> EngineErrors:
        """Post-process the received weights. ``abandon``: after a failure; do not wait for engines that hang."""
        ...

    async def load_files(self, directories: Mapping[Incarnation, str], version: int, flush_cache: bool) -> EngineErrors:
        """Replace the tensors of all safetensors files in each engine's directory, which is on its host."""
        ...

    async def on_host(
        self,
        engines: Sequence[Incarnation],
        function: Callable[[Path, *Ts], Answer],
        *arguments: *Ts,
        room: int = 0,
    ) -> Mapping[Incarnation, Answer | Exception]:
        """Call ``function(directory, *arguments)`` in a thread on each engine's host.

        ``directory`` belongs to this start of the engine and is removed with it; it is in memory if there is ``room``
        for that many bytes, else on disk. References to objects in ``arguments`` are resolved on the host.
        """
        ...


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
    """The sending rank's half of a weight transport. What else the driver's half calls is in a protocol beside that.

    It keeps the newest staged versions, and pinned ones.
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
