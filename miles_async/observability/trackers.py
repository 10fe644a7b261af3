"""The trackers of a run, by their flags. A new one is a file with its class, and an entry of ``TRACKERS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from miles_async.api import Tracker
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.background import BackgroundTracker
from miles_async.observability.metrics_file import FILE_NAME, MetricsFile
from miles_async.observability.mlflow_tracker import MlflowTracker, tracking_uri
from miles_async.observability.prometheus_tracker import PATH, PrometheusTracker, metrics_key
from miles_async.observability.swanlab_tracker import SwanlabTracker, swanlab_mode
from miles_async.observability.tensorboard_tracker import TensorBoardTracker, tensorboard_directory
from miles_async.observability.tracker_parts import Settings, TrackedRun, earlier_run_id
from miles_async.observability.trackio_tracker import TrackioTracker
from miles_async.observability.wandb_tracker import new_run_id, open_wandb, wandb_mode
from miles_async.runtime.hooks import check_object, load_object
from miles_async.runtime.network.addresses import LOCAL, Network

log = structlog.get_logger(__name__)


Open = Callable[[TrackedRun], Tracker | None]
"""Opens a tracker; None if the flags don't ask for it."""


def open_trackers(arguments: ObservabilityArguments, settings: Settings, network: Network = LOCAL) -> CompositeTracker:
    """Open the trackers that the flags ask for. Raises ConfigurationError, and OSError for metrics.jsonl."""
    run = TrackedRun(arguments=arguments, settings=settings, network=network)
    opened = (open_tracker(run) for open_tracker in TRACKERS.values())
    return CompositeTracker([tracker for tracker in opened if tracker is not None])


def _metrics_file(run: TrackedRun) -> Tracker:
    return MetricsFile(run.arguments.run_dir / FILE_NAME)


def _wandb(run: TrackedRun) -> Tracker | None:
    if (mode := wandb_mode(run.arguments)) == "disabled":
        return None
    continued = run.arguments.wandb_run_id or earlier_run_id("wandb")
    return open_wandb(run, mode, continued or new_run_id(), resume=continued is not None)


def _tensorboard(run: TrackedRun) -> Tracker | None:
    if not run.arguments.use_tensorboard:
        return None
    directory = tensorboard_directory(run.arguments)
    return BackgroundTracker("tensorboard", lambda: TensorBoardTracker(directory))


def _prometheus(run: TrackedRun) -> Tracker | None:
    return BackgroundTracker("prometheus", lambda: _open_prometheus(run)) if run.arguments.use_prometheus else None


def _open_prometheus(run: TrackedRun) -> PrometheusTracker:
    tracker = PrometheusTracker(run, metrics_key())
    log.info("metrics for Prometheus", url=run.network.url(run.network.entrance(), tracker.port) + PATH)
    return tracker


def _mlflow(run: TrackedRun) -> Tracker | None:
    if not run.arguments.use_mlflow:
        return None
    uri, continued = tracking_uri(run.arguments), run.arguments.mlflow_run_id or earlier_run_id("mlflow")
    return BackgroundTracker("mlflow", lambda: MlflowTracker(run, uri, continued))


def _trackio(run: TrackedRun) -> Tracker | None:
    if not run.arguments.use_trackio:
        return None
    continued = earlier_run_id("trackio")
    return BackgroundTracker("trackio", lambda: TrackioTracker(run, continued))


def _swanlab(run: TrackedRun) -> Tracker | None:
    arguments = run.arguments
    if not arguments.use_swanlab or (mode := swanlab_mode(arguments)) == "disabled":
        return None
    continued = earlier_run_id("swanlab")
    return BackgroundTracker("swanlab", lambda: SwanlabTracker(run, mode, continued))


def _custom(run: TrackedRun) -> Tracker | None:
    if (path := run.arguments.custom_tracker_path) is None:
        return None
    tracker = load_object(path, Tracker, "--custom-tracker-path")
    return BackgroundTracker(path, lambda: tracker)


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
    "prometheus": _prometheus,
    "mlflow": _mlflow,
    "trackio": _trackio,
    "swanlab": _swanlab,
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
        """Finish all at the same time, so that the end waits for the slowest one, not for each in turn."""
        with ThreadPoolExecutor(max_workers=max(1, len(self._trackers)), thread_name_prefix="finish") as threads:
            finishing = [(tracker, threads.submit(tracker.finish)) for tracker in self._trackers]
        for tracker, finished in finishing:
            if isinstance(error := finished.exception(), Exception):  # supervision point: as above
                self._failed(tracker, error)

    def _failed(self, tracker: Tracker, error: Exception) -> None:
        self.errors += 1
        if self.errors == 1:
            log.warning("tracker failed; the run continues", tracker=type(tracker).__name__, error=repr(error))
