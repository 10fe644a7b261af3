"""Trackers never block, never raise and never end a run (M12)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from miles_async.api import Tracker
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.errors import ConfigurationError
from miles_async.observability import background
from miles_async.observability.background import BackgroundTracker
from miles_async.observability.metrics_file import age_metrics
from miles_async.observability.trackers import CompositeTracker, check_tracker, open_trackers


class RecordingTracker:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.finished = 0

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.steps.append(step)

    def finish(self) -> None:
        self.finished += 1


class BrokenTracker:
    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        raise RuntimeError("the service says no")

    def finish(self) -> None:
        raise RuntimeError("the service still says no")


def test_composite_isolates_a_broken_tracker() -> None:
    # covers: M12
    good = RecordingTracker()
    both = CompositeTracker([BrokenTracker(), good])
    both.log({"reward/mean": 0.1}, step=0)
    both.log({"reward/mean": 0.1}, step=1)
    both.finish()
    assert good.steps == [0, 1]
    assert good.finished == 1
    assert both.errors == 3


def test_the_end_waits_for_slow_trackers_together() -> None:
    # covers: M12
    together = threading.Barrier(3)

    class WaitingTracker(RecordingTracker):
        def finish(self) -> None:
            together.wait(10)  # for the others to finish, too
            super().finish()

    waiting = [WaitingTracker() for _ in range(3)]
    all_of_them = CompositeTracker(waiting)
    all_of_them.finish()
    assert [tracker.finished for tracker in waiting] == [1, 1, 1]
    assert all_of_them.errors == 0


def test_background_passes_everything_in_order_and_finishes_once() -> None:
    inner = RecordingTracker()
    tracker = BackgroundTracker("test", lambda: inner)
    for step in range(100):
        tracker.log({}, step=step)
    tracker.finish()
    tracker.finish()
    tracker.log({}, step=100)
    assert inner.steps == list(range(100))
    assert inner.finished == 1


def test_background_opens_off_the_callers_thread_and_does_not_wait_for_it() -> None:
    # covers: M12
    may_open, opened_by = threading.Event(), []

    def slow_open() -> Tracker:
        may_open.wait()
        opened_by.append(threading.current_thread())
        return inner

    inner = RecordingTracker()
    tracker = BackgroundTracker("test", slow_open)
    tracker.log({}, step=0)
    assert inner.steps == []
    may_open.set()
    tracker.finish()
    assert inner.steps == [0]
    assert opened_by != [threading.current_thread()]


def test_background_survives_a_tracker_that_cannot_be_opened() -> None:
    # covers: M12
    def fail() -> Tracker:
        raise ConnectionError("no network")

    tracker = BackgroundTracker("test", fail)
    for step in range(10):
        tracker.log({}, step=step)
    tracker.finish()


def test_background_counts_the_errors_of_a_broken_tracker() -> None:
    # covers: M12
    tracker = BackgroundTracker("test", BrokenTracker)
    tracker.log({}, step=0)
    tracker.finish()
    assert tracker.errors == 2


def test_background_drops_and_counts_when_the_tracker_hangs_and_finish_gives_up() -> None:
    # covers: M12
    release = threading.Event()

    def hang() -> Tracker:
        release.wait()
        return RecordingTracker()

    abandoned: list[bool] = []
    tracker = BackgroundTracker("test", hang, capacity=3, finish_timeout=0.05, abandon=lambda: abandoned.append(True))
    for step in range(10):
        tracker.log({}, step=step)
    assert tracker.dropped == 7
    tracker.finish()
    assert abandoned == [True]
    release.set()


def test_a_long_wait_at_the_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    release, said = threading.Event(), list[tuple[str, object]]()

    def hang() -> Tracker:
        release.wait()
        return RecordingTracker()

    def warn(event: str, **fields: object) -> None:
        said.append((event, fields))
        release.set()

    monkeypatch.setattr(background, "_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(background.log, "warning", warn)
    BackgroundTracker("test", hang, finish_timeout=60.5).finish()
    assert said == [("waiting for a tracker to write its last metrics", {"tracker": "test", "at_most_seconds": 60.0})]


@pytest.mark.parametrize(("ages", "metrics"), [({}, {}), ({2: 1, 0: 127}, {"age/count/0": 127.0, "age/count/2": 1.0})])
def test_ages_become_flat_metrics(ages: dict[int, int], metrics: dict[str, float]) -> None:
    assert age_metrics(ages) == metrics


def user_tracker(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> ObservabilityArguments:
    (folder / "noting_trackers.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "noting_trackers", raising=False)
    return ObservabilityArguments(run_dir=folder / "run", custom_tracker_path="noting_trackers:Notes")


NOTES = """
steps, finished = [], []

class Notes:
    def log(self, metrics, *, step):
        steps.append((step, metrics["reward/mean"]))
        raise RuntimeError("full")

    def finish(self):
        finished.append(True)
"""


def test_a_tracker_of_the_users_is_given_what_the_others_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: M12
    trackers = open_trackers(user_tracker(tmp_path, monkeypatch, NOTES), {})
    trackers.log({"reward/mean": 0.5}, step=3)
    trackers.finish()
    import noting_trackers

    assert noting_trackers.steps == [(3, 0.5)]
    assert '"reward/mean": 0.5' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_tracker_of_the_users_is_checked_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = user_tracker(tmp_path, monkeypatch, "class Notes:\n    def log(self, metrics): ...\n")
    for begin in (check_tracker, lambda arguments: open_trackers(arguments, {})):
        with pytest.raises(
            ConfigurationError, match=r"--custom-tracker-path .* log\(\) must take .*; it has no finish"
        ):
            begin(arguments)


def test_checking_a_tracker_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = "\n    def __init__(self):\n        steps.append('made')\n"
    arguments = user_tracker(tmp_path, monkeypatch, NOTES.replace("class Notes:\n", f"class Notes:{made}\n"))
    check_tracker(arguments)
    import noting_trackers

    assert noting_trackers.steps == []
    arguments = user_tracker(
        tmp_path, monkeypatch, NOTES.replace("class Notes:\n", "class Notes:\n" + "    def __init__(self, url): ...\n")
    )
    with pytest.raises(ConfigurationError, match=r"cannot make one without arguments: .*url"):
        check_tracker(arguments)
