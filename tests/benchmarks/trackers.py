"""What a step costs each tracker: milliseconds that the training's thread waits, and CPU of the tracker's thread."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from miles_async.api import Tracker
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.background import BackgroundTracker
from miles_async.observability.metrics_file import FILE_NAME, MetricsFile
from miles_async.observability.mlflow_tracker import MlflowTracker
from miles_async.observability.prometheus_tracker import PrometheusTracker
from miles_async.observability.tensorboard_tracker import TensorBoardTracker
from miles_async.observability.tracker_parts import TrackedRun
from miles_async.observability.wandb_tracker import WandbTracker
from miles_async.runtime.network.keys import Secret
from tests.benchmarks.report import Row

STEPS = 50
METRICS = {f"train/metric_{number}": number / 7 for number in range(130)}  # as many as the quick start has


def rows() -> Iterator[Row]:
    """One per tracker; metrics.jsonl is written by the training's thread itself."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # no server
    with tempfile.TemporaryDirectory() as directory:
        for name, open_tracker in _trackers(Path(directory)).items():
            timed = _Timed(open_tracker)
            tracker = timed.opened() if name == FILE_NAME else BackgroundTracker(name, timed.opened)
            waited = 0.0
            for step in range(1, STEPS + 1):
                began = time.perf_counter()
                tracker.log(METRICS, step=step)
                waited += time.perf_counter() - began
            tracker.finish()
            assert timed.steps == STEPS
            yield {
                "tracker": name,
                "caller_ms_per_step": round(1000 * waited / STEPS, 3),
                "cpu_ms_per_step": round(1000 * timed.seconds / STEPS, 2),
            }


def _trackers(directory: Path) -> dict[str, Callable[[], Tracker]]:
    run = TrackedRun(arguments=ObservabilityArguments(run_dir=directory, prometheus_port=0))
    trackers: dict[str, Callable[[], Tracker]] = {
        FILE_NAME: lambda: MetricsFile(directory / FILE_NAME),
        "tensorboard": lambda: TensorBoardTracker(directory / "tensorboard"),
        "prometheus": lambda: PrometheusTracker(run, Secret("key")),
        "wandb (offline)": lambda: WandbTracker(run, "offline", "benchmark"),
    }
    if importlib.util.find_spec("mlflow"):  # an extra
        trackers["mlflow (files)"] = lambda: MlflowTracker(run, (directory / "mlflow").as_uri(), None)
    return trackers


class _Timed:
    """A tracker, and the CPU seconds of the threads that call its ``log``."""

    def __init__(self, open_tracker: Callable[[], Tracker]) -> None:
        self.seconds, self.steps = 0.0, 0
        self._open = open_tracker

    def opened(self) -> Tracker:
        self._tracker = self._open()
        return self

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        began = time.thread_time()
        self._tracker.log(metrics, step=step)
        self.seconds += time.thread_time() - began
        self.steps += 1

    def finish(self) -> None:
        self._tracker.finish()
