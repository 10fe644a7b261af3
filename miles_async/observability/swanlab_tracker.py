"""SwanLab. A run whose server cannot be used goes offline: files in the run directory (`swanlab sync` sends them)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from miles_async.arguments.observability import ObservabilityArguments, SwanlabMode
from miles_async.observability.tracker_parts import TrackedRun, flat_settings, mode_of, save_run_id

if TYPE_CHECKING:
    import swanlab

log = structlog.get_logger(__name__)

DIRECTORY = "swanlog"  # in the run directory


def swanlab_mode(arguments: ObservabilityArguments, environment: Mapping[str, str] = os.environ) -> SwanlabMode:
    """Return the mode of the flags, else of SWANLAB_MODE, else online. Raises ConfigurationError."""
    return mode_of(arguments.swanlab_mode, "SWANLAB_MODE", environment, {"cloud": "online"})  # its earlier name


class SwanlabTracker:
    """The Tracker itself, synchronous. Use it behind a BackgroundTracker."""

    def __init__(self, run: TrackedRun, mode: SwanlabMode, continued: str | None) -> None:
        """Open the run, offline if it cannot be online. ``continued``: id of a run to continue online.

        Raises SwanLab's errors if not even offline works.
        """
        run_dir = run.arguments.run_dir
        try:
            self._run = _open(run, mode, continued)
        except Exception as error:  # SwanLab raises errors of requests, pydantic and its own
            if mode != "online":
                raise
            log.warning(
                "SwanLab cannot be used online; the run writes its files, and `swanlab sync` sends them",
                directory=str(run_dir / DIRECTORY),
                error=str(error),
            )
            self._run = _open(run, "offline", None)
        else:
            save_run_id(run_dir, "swanlab", self._run.id)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Wait until SwanLab has everything."""
        self._run.finish()


def _open(run: TrackedRun, mode: SwanlabMode, continued: str | None) -> swanlab.Run:
    import swanlab

    arguments = run.arguments
    directory = arguments.run_dir / DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    hook = sys.excepthook
    try:
        return swanlab.init(
            mode=mode,
            log_dir=str(directory),
            project=arguments.swanlab_project,
            workspace=arguments.swanlab_workspace,
            name=arguments.run_dir.name,
            id=continued if mode == "online" else None,
            resume="allow" if continued is not None and mode == "online" else None,
            config=flat_settings(run.settings),
            settings=swanlab.Settings(
                interactive=False,  # it would ask for a key on the terminal
                terminal=swanlab.Settings.Terminal(proxy_type="none"),  # capturing would fight with the live display
            ),
        )
    finally:
        sys.excepthook = hook  # SwanLab's waits for its server when the run fails
