"""The trackers of a run, by their flags. A new one is a file with its class, and an entry of ``TRACKERS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import structlog

from miles_async.api import Tracker
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.background import BackgroundTracker
from miles_async.observability.metrics_file import FILE_NAME, MetricsFile
from miles_async.observability.tensorboard_tracker import TensorBoardTracker, tensorboard_directory
from miles_async.observability.wandb_tracker import WandbOptions, open_wandb, wandb_mode
from miles_async.runtime.hooks import check_object, load_object

log = structlog.get_logger(__name__)

Settings = Mapping[str, object]
"""The run's flags by group, for trackers that keep them."""

Open = Callable[[ObservabilityArguments, Settings], Tracker | None]
"""Opens a tracker; None if the flags don't ask for it."""


def open_trackers(arguments: ObservabilityArguments, settings: Settings) -> CompositeTracker:
    """Open the trackers that the flags ask for. Raises ConfigurationError, and OSError for metrics.jsonl."""
    opened = (open_tracker(arguments, settings) for open_tracker in TRACKERS.values())
    return CompositeTracker([tracker for tracker in opened if tracker is not None])


def _metrics_file(arguments: ObservabilityArguments, _settings: Settings) -> Tracker:
    return MetricsFile(arguments.run_dir / FILE_NAME)


def _wandb(arguments: ObservabilityArguments, settings: Settings) -> Tracker | None:
    if (mode := wandb_mode(arguments)) == "disabled":
        return None
    return open_wandb(
        WandbOptions(
            directory=arguments.run_dir,
            mode=mode,
            project=arguments.wandb_project,
            group=arguments.wandb_group,
            config=settings,
        )
    )


def _tensorboard(arguments: ObservabilityArguments, _settings: Settings) -> Tracker | None:
    if not arguments.use_tensorboard:
        return None
    directory = tensorboard_directory(arguments)
    return BackgroundTracker("tensorboard", lambda: TensorBoardTracker(directory))


def _custom(arguments: ObservabilityArguments, _settings: Settings) -> Tracker | None:
    if (tracker := load_tracker(arguments)) is None:
        return None
    return BackgroundTracker(str(arguments.custom_tracker_path), lambda: tracker)


def load_tracker(arguments: ObservabilityArguments) -> Tracker | None:
    """The object of ``--custom-tracker-path``. Raises ConfigurationError."""
    path = arguments.custom_tracker_path
    return None if path is None else load_object(path, Tracker, "--custom-tracker-path")


def check_tracker(arguments: ObservabilityArguments) -> None:
    """Check what ``--custom-tracker-path`` names, and make none of it yet. Raises ConfigurationError."""
    if arguments.custom_tracker_path is not None:
        check_object(arguments.custom_tracker_path, Tracker, "--custom-tracker-path")


# The user's comes first: if it cannot be used, nothing is open yet.
TRACKERS: Mapping[str, Open] = {
    "custom": _custom,
    "metrics.jsonl": _metrics_file,
    "wandb": _wandb,
    "tensorboard": _tensorboard,
}


class CompositeTracker:
    """Several trackers as one. A failing one is reported once and affects no other."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.errors = 0
        self._trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for tracker in self._trackers:
            try:
                tracker.log(metrics, step=step)
            except Exception as error:  # supervision point: telemetry never ends training
                self._failed(tracker, error)

    def finish(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.finish()
            except Exception as error:  # supervision point: as above
                self._failed(tracker, error)

    def _failed(self, tracker: Tracker, error: Exception) -> None:
        self.errors += 1
        if self.errors == 1:
            log.warning("tracker failed; the run continues", tracker=type(tracker).__name__, error=repr(error))
