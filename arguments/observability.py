"""What is recorded and shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.flag import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservabilityArguments:
    """Observability"""

    run_dir: Path = flag(Path("runs/latest"), "logs, metrics.jsonl, summary.json and plots go here")
    record: bool = flag(
        False,
        "write what the run is told and what it decides, tokens included, into the run directory, for `miles-async "
        "replay`",
    )
    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: str = flag(
        "offline", "offline writes to the run directory and needs no network", choices=("offline", "online")
    )
    wandb_project: str = flag("miles_async", "W&B project")
    wandb_group: str | None = flag(None, "W&B group")
    progress: bool = flag(True, "live progress on a terminal (plain lines elsewhere)")
    log_level: str = flag("info", "least severe messages on the console", choices=("debug", "info", "warning", "error"))
    stall_timeout: float = flag(
        900.0, "seconds without any step or finished group after which the run stops (C10)", metavar="SECONDS"
    )
