"""The two sides, and what both keep in a checkpoint, as the controller sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from miles_async.api import Metrics
from miles_async.seams.weights import WeightSenders
from miles_async.types import (
    Changes,
    JsonObject,
    PreparedBatch,
    Prompt,
    RolloutStats,
    SettingValue,
    StagedWeights,
    TokenScores,
)


@runtime_checkable
class PromptSource(Protocol):
    """An endless stream of prompts with a cursor. ``take`` never returns fewer than requested."""

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next ``count`` prompts as (epoch, prompt). Raises DataError naming file and line."""
        ...

    def state(self) -> JsonObject:
        """The cursor, JSON-serializable."""
        ...

    def restore(self, state: JsonObject) -> Sequence[str]:
        """Continue where :meth:`state` was taken. Return the accepted changes since then."""
        ...


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """How a run continues from a checkpoint."""

    step: int  # rollout steps trained
    version: int  # visible from now on
    readmissions: Mapping[str, Sequence[str]] = {}  # request → ids of quarantined prompts that get another budget
    accepted: tuple[str, ...] = ()  # changes of the model since then that ``--load-anyway`` accepted


class SavedSide(Protocol):
    """State saved in a checkpoint together with the trainer's."""

    async def snapshot(self) -> None:
        """Keep the current state for :meth:`save`, without copying or writing anything."""
        ...

    async def save(self, directory: Path) -> Mapping[str, str]:
        """Write the last snapshot while everything else continues. Return digests of its files, by path."""
        ...

    async def load(self, directory: Path, resumption: Resumption) -> None:
        """Restore a checkpoint."""
        ...


class RolloutSide(SavedSide, Protocol):
    """The rollout manager as the controller sees it. All waits end by deadline, error or close."""

    async def run(self) -> None:
        """Dispatch and supervise until :meth:`close`; raises the first error of the rollout side."""
        ...

    async def next_batch(self, target_version: int) -> PreparedBatch:
        """Cut one batch for the version the optimizer will step from (C1). Waits until there is one."""
        ...

    async def change(self, changes: Changes) -> None:
        """Apply changed settings, and record all changes in ledger and schedule. Call between two cuts; generation may
        be paused at any time.
        """
        ...

    async def trained(self, batch_id: int, scores: Sequence[TokenScores] = ()) -> None:
        """Record that the optimizer has stepped with this batch: its groups end as ``trained`` (C2). ``scores``: of its
        branches that are shown.
        """
        ...

    async def commit_version(self, version: int) -> None:
        """Mark ``version`` visible (again, if the step was not published) and free the slots of trained groups."""
        ...

    async def wait_for_joining(self) -> None:
        """Wait until an engine needs weights."""
        ...

    async def evaluate(self, step: int, data_sets: Collection[str] | None = None) -> Metrics:
        """Evaluate the weights after ``step`` rollout steps on these data sets, by name; None: on all."""
        ...

    async def evaluated(self) -> int:
        """Samples of the last evaluation that have ended, also while it runs."""
        ...

    async def describe(self) -> str:
        """Describe all waits, in lines for ``stall.txt`` (C10)."""
        ...

    async def count_stale(self, version: int) -> int:
        """Attempts outside a batch that publishing ``version`` now would make too old, or might (C5)."""
        ...

    async def close(self) -> None:
        """End attempts in flight as cancelled; :meth:`run` returns."""
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


class TrainerSide(WeightSenders, Protocol):
    """The trainer's ranks as the controller and the publisher see them."""

    token_scores: Sequence[TokenScores]  # of the last step's branches that are shown

    async def start(self) -> None: ...

    async def train(self, shards: Sequence[object]) -> Metrics:
        """Train one rollout step: all its optimizer steps on all ranks."""
        ...

    async def change(self, values: Mapping[str, SettingValue]) -> None:
        """Apply changed settings to later steps; settings of other parts are ignored."""
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
        """Restore the state saved after ``step`` trained steps. Raises CheckpointError."""
        ...

    async def digests(self, directory: Path, sizes: Mapping[str, int]) -> Mapping[str, str]:
        """Digests of files below ``directory``, read by all ranks in parallel. ``sizes``: their bytes, by path.

        Raises CheckpointError.
        """
        ...

    async def stop(self) -> None: ...
