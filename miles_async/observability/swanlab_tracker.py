"""SwanLab. A run whose server cannot be used goes offline: files in the run directory (`swanlab sync` sends them)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from miles_async.arguments.observability import ObservabilityArguments, SwanlabMode
from miles_async.observability.tracker_parts import Settings, flat_settings, mode_of, save_run_id

if TYPE_CHECKING:
    import swanlab

log = structlog.get_logger(__name__)

NAME = "swanlab"
DIRECTORY = "swanlog"  # in the run directory


def swanlab_mode(arguments: ObservabilityArguments, environment: Mapping[str, str] = os.environ) -> SwanlabMode:
    """Return the mode of the flags, else of SWANLAB_MODE, else online. Raises ConfigurationError."""
    return mode_of(arguments.swanlab_mode, "SWANLAB_MODE", environment, {"cloud": "online"})  # its earlier name


@dataclass(frozen=True, kw_only=True, slots=True)
class SwanlabOptions:
    """Where to log."""

    run_dir: Path  # files go to <run_dir>/swanlog
    mode: SwanlabMode
    project: str
    workspace: str | None = None  # None: the user's own
    run_id: str | None = None  # online: of the run to continue; None: a new one
    settings: Settings = field(default_factory=dict)


class SwanlabTracker:
    """The Tracker itself, synchronous. Use it behind a BackgroundTracker."""

    def __init__(self, options: SwanlabOptions) -> None:
        """Open the run, offline if it cannot be online. Raises SwanLab's errors if not even that works."""
        try:
            self._run = _open(options)
        except Exception as error:  # SwanLab raises errors of requests, pydantic and its own
            if options.mode != "online":
                raise
            log.warning(
                "SwanLab cannot be used online; the run writes its files, and `swanlab sync` sends them",
                directory=str(options.run_dir / DIRECTORY),
                error=str(error),
            )
            self._run = _open(replace(options, mode="offline", run_id=None))
        else:
            save_run_id(options.run_dir, NAME, self._run.id)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Wait until SwanLab has everything."""
        self._run.finish()


def _open(options: SwanlabOptions) -> swanlab.Run:
    import swanlab

    directory = options.run_dir / DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    hook = sys.excepthook
    try:
        return swanlab.init(
            mode=options.mode,
            log_dir=str(directory),
            project=options.project,
            workspace=options.workspace,
            name=options.run_dir.name,
            id=options.run_id if options.mode == "online" else None,
            resume="allow" if options.run_id is not None and options.mode == "online" else None,
            config=flat_settings(options.settings),
            settings=swanlab.Settings(
                interactive=False,  # it would ask for a key on the terminal
                terminal=swanlab.Settings.Terminal(proxy_type="none"),  # capturing would fight with the live display
            ),
        )
    finally:
        sys.excepthook = hook  # SwanLab's waits for its server when the run fails
