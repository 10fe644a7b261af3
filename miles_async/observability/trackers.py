"""The trackers of a run, by their flags. A new one is a file with its class, and a condition in ``_trackers``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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


def open_trackers(arguments: ObservabilityArguments, settings: Settings, network: Network = LOCAL) -> CompositeTracker:
    """Open the trackers that the flags ask for. Raises ConfigurationError, and OSError for metrics.jsonl."""
    return CompositeTracker([*_trackers(TrackedRun(arguments=arguments, settings=settings, network=network))])


def _trackers(run: TrackedRun) -> Iterator[Tracker]:
    arguments = run.arguments
    if (path := arguments.custom_tracker_path) is not None:  # the user's first: if it is unusable, nothing is open yet
        custom = load_object(path, Tracker, "--custom-tracker-path")
        yield BackgroundTracker(path, lambda: custom)
    yield MetricsFile(arguments.run_dir / FILE_NAME)
    if (mode := wandb_mode(arguments)) != "disabled":
        continued = arguments.wandb_run_id or earlier_run_id("wandb")
        yield open_wandb(run, mode, continued or new_run_id(), resume=continued is not None)
    if arguments.use_tensorboard:
        yield BackgroundTracker("tensorboard", partial(TensorBoardTracker, tensorboard_directory(arguments)))
    if arguments.use_prometheus:
        yield BackgroundTracker("prometheus", partial(_open_prometheus, run))
    if arguments.use_mlflow:
        continued = arguments.mlflow_run_id or earlier_run_id("mlflow")
        yield BackgroundTracker("mlflow", partial(MlflowTracker, run, tracking_uri(arguments), continued))
    if arguments.use_trackio:
        yield BackgroundTracker("trackio", partial(TrackioTracker, run, earlier_run_id("trackio")))
    if arguments.use_swanlab and (swanlab := swanlab_mode(arguments)) != "disabled":
        yield BackgroundTracker("swanlab", partial(SwanlabTracker, run, swanlab, earlier_run_id("swanlab")))


def _open_prometheus(run: TrackedRun) -> PrometheusTracker:
    tracker = PrometheusTracker(run, metrics_key())
    log.info("metrics for Prometheus", url=run.network.url(run.network.entrance(), tracker.port) + PATH)
    return tracker


def check_tracker(arguments: ObservabilityArguments) -> None:
    """Check what ``--custom-tracker-path`` names, and make none of it yet. Raises ConfigurationError."""
    if arguments.custom_tracker_path is not None:
        check_object(arguments.custom_tracker_path, Tracker, "--custom-tracker-path")


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
