"""The seams. Every plug-in point and every boundary between two adapters is one of these protocols.

``controller.py`` sees nothing else of the system; ``train.py`` chooses the implementations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from miles_async.types import (
    Attempt,
    CanaryScore,
    EngineLoad,
    FleetMembers,
    Generation,
    Group,
    PreparedBatch,
    Prompt,
    Sample,
    StagedWeights,
    TensorMeta,
    TrainShard,
)

Metrics = Mapping[str, float]


# ---------------------------------------------------------------------------------------------- prompts
@runtime_checkable
class PromptSource(Protocol):
    """An endless stream of prompts with a cursor. ``take`` never returns fewer than asked for."""

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next ``count`` prompts as (epoch, prompt). Raises DataError naming file and line."""
        ...

    def state(self) -> dict[str, Any]:
        """The cursor, JSON-serializable."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


# ---------------------------------------------------------------------------------------------- rollout
class EngineClient(Protocol):
    """Token-in-token-out generation through the router."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        routing_key: str,
    ) -> Generation:
        """One generation call. Retries transient errors within its budget.

        Raises TransientEngineError when the budget is spent, RequestRejectedError, VersionUnknownError.
        An abort is a Generation with finish_reason "abort" and partial output, not an exception.
        """
        ...


class EngineLoads(Protocol):
    """How many engines there are to generate and how loaded they are: what the dispatcher's concurrency follows."""

    async def serving(self, other_than: int) -> int:
        """How many engines serve, as soon as it is not ``other_than``."""
        ...

    async def loads(self) -> Mapping[str, EngineLoad]:
        """Of each engine that takes requests, by its id. One that doesn't answer within seconds is left out."""
        ...


@runtime_checkable
class Generate(Protocol):
    """``--custom-generate-function-path module:attr``: one trajectory of one prompt."""

    async def __call__(self, client: EngineClient, attempt: Attempt, sample_index: int) -> Sample: ...


@runtime_checkable
class Reward(Protocol):
    """``--custom-rm-path module:attr``: the reward of one sample. Raises RewardError (or anything) on failure."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> float: ...


@runtime_checkable
class GroupFilter(Protocol):
    """Says why a rewarded group must not be trained on, or None to keep it."""

    def __call__(self, group: Group) -> str | None: ...


class RolloutSide(Protocol):
    """The rollout manager as the controller sees it. All waits end by deadline, error or close."""

    async def run(self) -> None:
        """Dispatch and supervise until :meth:`close`; raises the first error of the rollout side."""
        ...

    async def next_batch(self, target_version: int) -> PreparedBatch:
        """Cut one batch for the version the optimizer will step from (C1). Waits until there is one."""
        ...

    async def trained(self, batch_id: int) -> None:
        """The optimizer has stepped with this batch: its groups end as ``trained`` (C2)."""
        ...

    async def commit_version(self, version: int) -> None:
        """``version`` is visible (again, if the step was not published): what was trained makes room."""
        ...

    async def wait_for_joining(self) -> None:
        """Returns when an engine waits for weights."""
        ...

    async def evaluate(self) -> Metrics: ...

    async def stats(self) -> dict[str, Any]:
        """Balance of attempts, in-flight, buffer, idle seconds; cheap, for logs, summary and watchdog."""
        ...

    async def count_stale(self, version: int) -> int:
        """Attempts outside a batch that publishing ``version`` now would make too old, or might (C5)."""
        ...

    async def snapshot(self) -> None:
        """Keep what :meth:`save` will write, as of now. Quick: nothing is copied or written."""
        ...

    async def save(self, directory: Path) -> None:
        """Write the last snapshot, while everything else goes on."""
        ...

    async def load(
        self, directory: Path, *, step: int, version: int, readmissions: Mapping[str, Sequence[str]]
    ) -> None:
        """Go on where a checkpoint was taken, after ``step`` trained steps, from ``version``."""
        ...

    async def close(self) -> None:
        """End what is in flight as cancelled; :meth:`run` returns."""
        ...

    async def last_stats(self) -> dict[str, Any]:
        """:meth:`close`, and :meth:`stats` when everything has ended."""
        ...

    async def stop(self) -> None:
        """Engines and router down."""
        ...


# ---------------------------------------------------------------------------------------------- trainer
class TrainerSide(Protocol):
    """All trainer ranks as the controller and the publisher see them."""

    async def start(self) -> None: ...

    async def train(self, shards: Sequence[Any]) -> Metrics:
        """One rollout step: all its optimizer steps on all ranks."""
        ...

    async def stage_weights(self, version: int) -> StagedWeights:
        """Export into buckets on the sending rank and score the canary. Collective over all ranks."""
        ...

    async def open_group(self, group_name: str, world_size: int) -> tuple[str, int]:
        """The sending rank listens for a process group with the engines; returns (address, port) to join at.

        The port is the system's choice and held from the start, so nobody can take it in between.
        """
        ...

    async def join_group(self, group_name: str) -> None:
        """The sending rank joins as rank 0; returns when all ``world_size`` members are there."""
        ...

    async def send_bucket(self, group_name: str, version: int, index: int) -> None:
        """Broadcast one staged bucket. A broken group is no error here: the receivers report it."""
        ...

    async def leave_group(self, group_name: str) -> None: ...

    async def save(self, directory: Path) -> None: ...

    async def save_hf(self, directory: Path) -> None:
        """Weights, config and tokenizer as Hugging Face files."""
        ...

    async def load(self, directory: Path) -> None: ...

    async def stop(self) -> None: ...


class PolicyLoss(Protocol):
    """The loss of one micro-batch; torch tensors in and out (typed Any: this module doesn't import torch)."""

    needs_old_logprobs: bool  # an extra forward pass before the first optimizer step is required
    needs_reference: bool

    def __call__(self, logprobs: Any, entropy: Any, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Sum over loss tokens of the loss, and metric sums.

        ``logprobs``, ``entropy``: float32 [N], of ``tokens[i]`` given its prefix (0 for the first token of
        each sample). ``batch``: the arrays of the TrainBatch as tensors, ``advantages`` expanded to [N],
        plus ``old_logprobs`` and ``ref_logprobs`` [N] where needed. Metrics are sums over loss tokens, except
        names ending in ``_max``.
        """
        ...


class TrainBackend(Protocol):
    """One rank of the training engine (``backends/megatron``), found by entry point ``miles_async.backends``."""

    data_parallel_rank: int
    is_weight_source: bool  # the rank that holds the full export and sends it

    def train(self, shard: TrainShard) -> dict[str, float]: ...

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float | None = None) -> list[list[float]]:
        """Log-probs of tokens[1:] of each sequence, at the rollout temperature unless given. Collective."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Any]]:
        """(HF name, torch tensor) in a fixed order, on every rank. Collective."""
        ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...

    def save_hf(self, directory: Path) -> None: ...


# ---------------------------------------------------------------------------------------------- weights
class EngineFleet(Protocol):
    """The engines as the publisher sees them. Every call fans out to the named engines concurrently and
    returns, per engine id, None or the error that it met; it raises only for its own bugs.
    """

    async def members(self) -> FleetMembers: ...

    async def probe(self, engines: Sequence[str]) -> EngineErrors:
        """Whether they answer at all."""
        ...

    async def pause(self, engines: Sequence[str], mode: str) -> EngineErrors:
        """Stops new requests at our side too, until :meth:`resume`."""
        ...

    async def flush_cache(self, engines: Sequence[str]) -> EngineErrors: ...

    async def connect(
        self, engines: Sequence[str], group_name: str, address: str, port: int, world_size: int, backend: str
    ) -> EngineErrors:
        """Engines join as ranks 1.. in the order given (tensor-parallel engines take several ranks)."""
        ...

    async def disconnect(self, engines: Sequence[str], group_name: str) -> EngineErrors: ...

    async def begin_update(self, engines: Sequence[str]) -> EngineErrors: ...

    async def receive_bucket(
        self, engines: Sequence[str], group_name: str, tensors: Sequence[TensorMeta], version: int, flush_cache: bool
    ) -> EngineErrors: ...

    async def end_update(self, engines: Sequence[str]) -> EngineErrors: ...

    async def resume(self, engines: Sequence[str]) -> EngineErrors: ...

    async def score(self, engines: Sequence[str], tokens: Sequence[int]) -> Mapping[str, CanaryScore | Exception]: ...

    async def admit(self, engines: Sequence[str], version: int) -> None:
        """These engines hold ``version``, verified: make (or keep) them routable."""
        ...

    async def fence(self, engines: Sequence[str], reason: str) -> None:
        """Take out of the router, end their requests, restart them; they come back as joining."""
        ...


EngineErrors = Mapping[str, Exception | None]


class WeightSender(Protocol):
    """The trainer's end of a transport; lives in the sending rank."""

    def open_group(self, group_name: str, world_size: int) -> tuple[str, int]: ...

    def join_group(self, group_name: str) -> None: ...

    def send(self, group_name: str, tensors: Sequence[Any]) -> None: ...

    def leave_group(self, group_name: str) -> None: ...


# -------------------------------------------------------------------------------------------- observability
class Tracker(Protocol):
    """Where metrics go. Must never block or raise into training."""

    def log(self, metrics: Metrics, *, step: int) -> None: ...

    def finish(self) -> None: ...
