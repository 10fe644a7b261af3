"""Several trackers as one, each guarded: a failing one is reported once and affects no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from miles_async.api import Tracker

log = structlog.get_logger(__name__)

AGE_COUNT = "age/count/"


def age_metrics(ages: Mapping[int, int]) -> dict[str, float]:
    """A step's histogram as flat metrics: ``{0: 96, 1: 32}`` → ``{"age/count/0": 96, "age/count/1": 32}``."""
    return {f"{AGE_COUNT}{age}": float(count) for age, count in sorted(ages.items())}


class CompositeTracker:
    """Pass everything to all trackers; raise nothing."""

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
            log.warning("tracker failed; the run goes on", tracker=type(tracker).__name__, error=repr(error))
