"""Run a tracker that may be slow, hang or fail in a separate thread, behind a bounded queue.

Telemetry never blocks or kills training: opening and logging happen on a daemon thread; a full queue drops
and counts; a failure is one warning; the end of the run waits only so long.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial

import structlog

from miles_async.api import Tracker

log = structlog.get_logger(__name__)

_SILENT_SECONDS = 5.0  # of waiting at the end, before it says so

_Step = tuple[dict[str, float], int]  # metrics, step


class BackgroundTracker:
    """A Tracker that passes metrics to another one, which ``open_tracker`` makes in the thread."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        *,
        capacity: int = 1024,
        finish_timeout: float = 60.0,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        """``capacity``: steps that may wait. ``finish_timeout``: seconds :meth:`finish` waits for them, before it calls
        ``abandon``.
        """
        self.dropped = 0
        self.errors = 0
        self._name = name
        self._open = open_tracker
        self._capacity = capacity
        self._finish_timeout = finish_timeout
        self._abandon = abandon
        self._queue: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()  # None: the end
        self._usable = True
        self._finished = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Queue metrics; drop them if the tracker is too far behind, gone or finished."""
        if not self._usable or self._finished:
            return
        if self._queue.qsize() >= self._capacity:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("tracker is behind: metrics are dropped", tracker=self._name, step=step)
            return
        self._queue.put((dict(metrics), step))

    def finish(self) -> None:
        """Wait up to ``finish_timeout`` until the tracker has written all queued steps; idempotent."""
        if self._finished:
            return
        self._finished = True
        self._queue.put(None)
        self._thread.join(min(_SILENT_SECONDS, self._finish_timeout))
        if self._thread.is_alive() and (longer := self._finish_timeout - _SILENT_SECONDS) > 0:
            log.warning("waiting for a tracker to write its last metrics", tracker=self._name, at_most_seconds=longer)
            self._thread.join(longer)
        if self._thread.is_alive():
            log.warning("tracker did not finish in time; its last metrics may be lost", tracker=self._name)
            self._abandon()
        if self.dropped or self.errors:
            log.warning("tracker lost steps", tracker=self._name, dropped=self.dropped, errors=self.errors)

    def _run(self) -> None:
        try:
            tracker = self._open()
        except Exception as error:  # supervision point: a run without this tracker is better than no run
            self._usable = False
            log.warning("tracker unavailable; continuing without it", tracker=self._name, error=str(error))
            return
        while (item := self._queue.get()) is not None:
            metrics, step = item
            self._guarded(partial(tracker.log, metrics, step=step))
        self._guarded(tracker.finish)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # supervision point: counted, reported once
            self.errors += 1
            if self.errors == 1:
                log.warning("tracker failed; the run continues", tracker=self._name, error=str(error))
