"""Trackio: a database on this machine, or a Hugging Face Space."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from miles_async.observability.tracker_parts import Settings, flat_settings, save_run_id

NAME = "trackio"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackioOptions:
    """Where to log."""

    run_dir: Path
    project: str
    space_id: str | None = None  # None: TRACKIO_SPACE_ID, else this machine
    continued: str | None = None  # name of the run to continue; None: a new one
    settings: Settings = field(default_factory=dict)


class TrackioTracker:
    """The Tracker itself. Trackio sends in separate threads, and may print where it logs."""

    def __init__(self, options: TrackioOptions) -> None:
        """Open the run. Raises Trackio's errors."""
        import trackio  # takes a second

        name = options.continued or _new_name(options.run_dir)  # by which Trackio finds a run to continue
        self._run = trackio.init(
            project=options.project,
            name=name,
            space_id=options.space_id,
            config=flat_settings(options.settings),
            resume="allow" if options.continued else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        save_run_id(options.run_dir, NAME, self._run.name)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hand the metrics of a step to Trackio's thread."""
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Wait until they are written, half a minute at most."""
        self._run.finish()


def _new_name(run_dir: Path) -> str:
    """A name that no other run has: "latest-20261125-101502-3fa1"."""
    return f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
