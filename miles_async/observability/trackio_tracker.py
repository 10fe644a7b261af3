"""Trackio: a database on this machine, or a Hugging Face Space."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from miles_async.observability.tracker_parts import TrackedRun, flat_settings, save_run_id


class TrackioTracker:
    """The Tracker itself. Trackio sends in separate threads, and may print where it logs."""

    def __init__(self, run: TrackedRun, continued: str | None) -> None:
        """Open the run. ``continued``: name of a run to continue; None for a new one. Raises Trackio's errors."""
        import trackio  # takes a second

        arguments = run.arguments
        new_name = f"{arguments.run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._run = trackio.init(
            project=arguments.trackio_project,
            name=continued or new_name,  # by which Trackio finds a run to continue: no other run has it
            space_id=arguments.trackio_space_id,
            config=flat_settings(run.settings),
            resume="allow" if continued else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        save_run_id(arguments.run_dir, "trackio", self._run.name)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hand the metrics of a step to Trackio's thread."""
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Wait until they are written, half a minute at most."""
        self._run.finish()
