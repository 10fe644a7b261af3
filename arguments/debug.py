"""One side of a run without the other, the data that passes between them, and profiles of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag

ALL_RANKS = "all"

STEP_FIELD = "{rollout_id}"
"""Stands for the step, from 1, in names of files."""

Sides = Literal["both", "rollout", "trainer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugArguments:
    """Debugging"""

    debug_rollout_only: bool = flag(
        False,
        "start no trainer: engines serve the weights of --hf-checkpoint, and batches are cut, counted as trained and "
        "discarded; to try prompts and rewards and measure the engines",
    )
    debug_train_only: bool = flag(
        False,
        "start no engine and publish nothing: train on --load-debug-rollout-data, which implies this flag; without "
        "data, export the checkpoint of --load to --save-hf",
    )
    save_debug_rollout_data: Path | None = flag(
        None,
        "write each batch, as it was cut, to this Parquet file; {rollout_id} in it stands for the step, from 1",
        metavar="FILE",
    )
    load_debug_rollout_data: Path | None = flag(
        None,
        "train on files of --save-debug-rollout-data, from a run with any layout and batch size; without {rollout_id} "
        "in the name, on the same batch in every step",
        metavar="FILE",
    )
    profile_step: int | None = flag(
        None,
        "profile the training of this rollout step, from 1, with PyTorch's profiler, into profiles/ of the run "
        "directory; that step takes longer",
        metavar="STEP",
        at_least=1,
    )
    profile_ranks: tuple[str, ...] = flag(
        ("0",), "trainer ranks of --profile-step, or all", metavar="RANK", needs=("profile_step",)
    )
    record_memory_history: bool = flag(
        False,
        "on the ranks of --profile-step, record every allocation of GPU memory from the start to that step, or to a "
        "step before that runs out of memory, into profiles/ as well; CUDA only",
        needs=("profile_step",),
    )

    def profiled_ranks(self, world_size: int) -> frozenset[int]:
        """Ranks of ``--profile-ranks``. Raises ValueError: a word is not a rank below ``world_size``."""
        if self.profile_ranks == (ALL_RANKS,):
            return frozenset(range(world_size))
        for word in self.profile_ranks or ("none",):
            if not word.isdecimal() or int(word) >= world_size:
                raise ValueError(f"expected ranks from 0 to {world_size - 1}, or {ALL_RANKS}, found {word}")
        return frozenset(map(int, self.profile_ranks))

    @property
    def exports(self) -> bool:
        """A trainer alone that has nothing to train on: it loads a checkpoint and exports it."""
        return self.debug_train_only and self.load_debug_rollout_data is None

    @property
    def sides(self) -> Sides:
        """Sides that run."""
        if self.debug_rollout_only:
            return "rollout"
        return "trainer" if self.debug_train_only or self.load_debug_rollout_data is not None else "both"


def file_of_step(template: Path, rollout_id: int) -> Path:
    """The file of one step.

    >>> file_of_step(Path("dumps/{rollout_id}.parquet"), 17)
    PosixPath('dumps/17.parquet')
    """
    return Path(str(template).replace(STEP_FIELD, str(rollout_id)))
