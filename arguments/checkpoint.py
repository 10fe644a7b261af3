"""Saving and resuming."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointArguments:
    """Checkpoint"""

    save: Path | None = flag(None, "directory for checkpoints (default: none are written)")
    save_interval: int | None = flag(None, "rollout steps between checkpoints (default: only at the end)")
    save_hf: Path | None = flag(None, "directory for a Hugging Face export of the final weights")
    load: Path | None = flag(None, "resume from the newest whole checkpoint in this directory")
