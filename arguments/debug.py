"""One side of a run without the other, and the data that passes between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_async.arguments.flag import flag

STEP_FIELD = "{rollout_id}"
"""Stands for the step, from 0, in names of files."""

Sides = Literal["both", "rollout", "trainer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugArguments:
    """Debugging"""

    debug_rollout_only: bool = flag(
        False,
        "start no trainer: engines serve the weights of --hf-checkpoint, and batches are cut, counted as trained and "
        "forgotten; for prompts, rewards and the engines' speed",
    )
    debug_train_only: bool = flag(
        False, "start no engine: train on --load-debug-rollout-data, which alone means the same; nothing is published"
    )
    save_debug_rollout_data: Path | None = flag(
        None,
        "write each batch, as it was cut, to this Parquet file; {rollout_id} in it stands for the step, from 0",
        metavar="FILE",
    )
    load_debug_rollout_data: Path | None = flag(
        None,
        "train on what --save-debug-rollout-data wrote, whatever the layout and the batch size of that run; without "
        "{rollout_id} in it, on the same batch in every step",
        metavar="FILE",
    )

    @property
    def sides(self) -> Sides:
        """Those that run."""
        if self.debug_rollout_only:
            return "rollout"
        return "trainer" if self.debug_train_only or self.load_debug_rollout_data is not None else "both"


def file_of_step(template: Path, rollout_id: int) -> Path:
    """The file of one step.

    >>> file_of_step(Path("dumps/{rollout_id}.parquet"), 17)
    PosixPath('dumps/17.parquet')
    """
    return Path(str(template).replace(STEP_FIELD, str(rollout_id)))
