"""One side of a run without the other, and the data that passes between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag

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
        False, "start no engine and publish nothing: train on --load-debug-rollout-data, which implies this flag"
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
