"""Weights & Biases. Offline by default: files in the run directory, no network, no key (`wandb sync` sends).

The driver logs for all processes, which is the only way offline. Online, several processes may log to one run
(``shared``): one primary, and each with a label of its own that keeps its system metrics apart.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import stamina

from miles_async.arguments.observability import WandbMode
from miles_async.observability.background import BackgroundTracker
from miles_async.types import JsonObject

INIT_TIMEOUT = 300.0  # seconds; wandb's own 90 s are too few when many jobs start at once on a cluster
INIT_ATTEMPTS = 3


def new_run_id() -> str:
    """Make the id that all writers of one run share."""
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbOptions:
    """Options of ``wandb.init``."""

    directory: Path  # files go to <directory>/wandb
    mode: WandbMode = "offline"
    project: str = "miles_async"
    group: str | None = None
    config: JsonObject = field(default_factory=dict)
    run_id: str = field(default_factory=new_run_id)
    shared: bool = False  # online only: several writers log to this run, with one run_id
    label: str = "driver"  # unique per writer
    primary: bool = True  # exactly one writer is primary
    init_timeout: float = INIT_TIMEOUT


class WandbTracker:
    """The Tracker itself, synchronous. Use :func:`open_wandb`, which keeps it off the training's thread."""

    def __init__(self, options: WandbOptions) -> None:
        """Open the run. Communication errors are retried with exponential backoff; others raise."""
        import wandb  # takes a second, so only processes that log to it import it

        settings = wandb.Settings(
            init_timeout=options.init_timeout,
            x_label=options.label,
            x_primary=options.primary,
            x_update_finish_state=options.primary,  # a secondary that ends must not mark the run as finished
            console="off",  # capturing it would fight with the live display over stdout
            silent=True,
        )
        options.directory.mkdir(parents=True, exist_ok=True)
        retrying = stamina.retry_context(
            on=wandb.errors.CommError, attempts=INIT_ATTEMPTS, timeout=None, wait_initial=1.0, wait_max=10.0
        )
        mode: WandbMode | Literal["shared"] = "shared" if options.shared and options.mode == "online" else options.mode
        for attempt in retrying:
            with attempt:
                self._run = wandb.init(
                    dir=options.directory,
                    mode=mode,
                    project=options.project,
                    group=options.group,
                    id=options.run_id,
                    config=dict(options.config),
                    settings=settings,
                )
        # shared mode orders by arrival, so the step is a metric of its own and every chart's x-axis
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log({**metrics, "step": step})

    def finish(self) -> None:
        self._run.finish()


def open_wandb(options: WandbOptions) -> BackgroundTracker:
    """Return a tracker at once; a W&B that is slow, absent or broken costs a warning."""
    return BackgroundTracker("wandb", lambda: WandbTracker(options))
