"""One place that the controller tells what happened; trackers, progress and summary hear of it from here."""

from __future__ import annotations

from collections.abc import Mapping

from miles_async.api import Tracker
from miles_async.observability.progress import Progress
from miles_async.observability.summary import RunSummary
from miles_async.observability.tracker import age_metrics
from miles_async.types import Publication


class RunRecorder:
    """The controller's Recorder."""

    def __init__(self, tracker: Tracker, progress: Progress, summary: RunSummary) -> None:
        self._tracker = tracker
        self._progress = progress
        self._summary = summary

    def step(self, step: int, metrics: Mapping[str, float], ages: Mapping[int, int]) -> None:
        """A step was trained. ``ages``: age → samples trained at that age."""
        self._tracker.log({**metrics, **age_metrics(ages)}, step=step)
        self._progress.step(step, metrics)
        self._summary.record_step(step, metrics, ages)

    def publication(self, record: Publication) -> None:
        """Weights became visible to rollouts."""
        self._summary.record_publication(record.pause_seconds, record.prepare_seconds, record.version)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation of the weights after ``step`` steps is complete; empty metrics are no evaluation."""
        if "eval/accuracy" not in metrics:
            return
        self._tracker.log(metrics, step=step)
        self._progress.evaluation(step, metrics)
        self._summary.record_eval(step, metrics["eval/accuracy"])
