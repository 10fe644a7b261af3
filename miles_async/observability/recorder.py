"""The recorder: passes events from the controller to trackers, progress and summary."""

from __future__ import annotations

from collections.abc import Mapping

from miles_async.api import Tracker
from miles_async.observability.metrics_file import age_metrics
from miles_async.observability.progress import Progress
from miles_async.observability.summary import RunSummary
from miles_async.types import Publication


class RunRecorder:
    """The controller's Recorder. A step counts from 1, so that it is the number of steps behind its weights."""

    def __init__(self, tracker: Tracker, progress: Progress, summary: RunSummary) -> None:
        self._tracker = tracker
        self._progress = progress
        self._summary = summary
        self._published = False

    def step(self, step: int, metrics: Mapping[str, float], ages: Mapping[int, int]) -> None:
        """Record a trained step. ``ages``: age → samples trained at that age."""
        self._tracker.log({**metrics, **age_metrics(ages)}, step=step)
        self._progress.step(step, metrics)
        self._summary.record_step(metrics, ages)

    def publication(self, record: Publication) -> None:
        """Record weights that became visible to rollouts. After the first ones a run waits for its first step."""
        if not self._published:
            self._progress.phase("the first step")
            self._published = True
        self._summary.record_publication(record.pause_seconds, record.prepare_seconds)

    def checkpoint(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tracker.log(metrics, step=step)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation of the weights after ``step`` steps; one of some data sets has no mean over all."""
        if metrics:
            self._tracker.log(metrics, step=step)
        if "eval/reward" in metrics:
            self._progress.evaluation(step, metrics)
            self._summary.record_eval(metrics["eval/reward"])
