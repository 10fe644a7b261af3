"""Saving and resuming."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.flag import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointArguments:
    """Checkpoint"""

    save: Path | None = flag(None, "directory for this run's checkpoints (default: none are written)")
    save_interval: int | None = flag(
        None, "rollout steps between checkpoints (default: only at the end)", needs=("save",), at_least=1
    )
    async_save: bool = flag(
        True,
        "write the trainer's part of a checkpoint while training continues, from a copy of that size in host memory",
        needs=("save",),
    )
    save_keep_last: int | None = flag(
        None,
        "keep only the newest N checkpoints (default: all; 1 with --save-retain-interval)",
        metavar="N",
        needs=("save",),
        at_least=1,
    )
    save_retain_interval: int | None = flag(
        None,
        "keep the checkpoint of every Nth rollout step permanently (default: none)",
        metavar="N",
        needs=("save",),
        at_least=1,
    )
    save_overwrite: bool = flag(
        False, "allow this run's first checkpoint to replace conflicting ones in --save", needs=("save",)
    )
    save_hf: Path | None = flag(None, "directory for a Hugging Face export of the final weights")
    max_run_restarts: int = flag(
        0,
        "restart the run from its newest checkpoint, at most N times per hour, if a machine fault cost it a trainer "
        "rank, the rollout manager, Ray or the driver, or if it stalled after its first step",
        metavar="N",
        needs=("save",),
        at_least=0,
    )
    load: Path | None = flag(
        None,
        "resume from this checkpoint (a directory iter_N), or from the newest of the run that saved here; if that is "
        "the directory of --save and nothing was saved yet, the run starts fresh",
    )
    load_anyway: tuple[str, ...] = flag(
        (),
        "what may differ between this run and the one that was saved: names that the refusal gives, such as "
        "rope_theta, eos_token_id, tokenizer, chat_template or prompt_data",
        metavar="NAME",
        needs=("load",),
    )

    def due(self, step: int, *, last: bool) -> bool:
        """True if a checkpoint is written after ``step`` trained steps; ``last``: these are all."""
        if self.save is None:
            return False
        return last or (self.save_interval is not None and step % self.save_interval == 0)
