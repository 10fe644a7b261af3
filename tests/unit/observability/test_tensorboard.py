"""TensorBoard's own reader finds what was logged, after a restart and after a full disk, too."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.tensorboard_tracker import TensorBoardTracker, tensorboard_directory
from miles_async.observability.trackers import open_trackers
from tests.unit.observability.tracked import require_that_metrics_are_written


def shown(directory: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) as TensorBoard shows them."""
    reader = EventAccumulator(str(directory)).Reload()
    return [(event.step, round(event.value, 4)) for event in reader.Scalars(tag)]


def log_run(directory: Path, steps: Mapping[int, float], *, began: float) -> None:
    """Log the steps of a whole run, which began at this time."""
    tracker = TensorBoardTracker(directory, clock=lambda: began)
    log_steps(tracker, steps)
    tracker.finish()


def log_steps(tracker: TensorBoardTracker, steps: Mapping[int, float]) -> None:
    for step, value in steps.items():
        tracker.log({"reward/mean": value}, step=step)


def test_every_metric_is_a_curve_over_steps(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    log_steps(tracker, {1: 0.25, 2: 0.5})
    tracker.log({"eval/reward": 0.75, "age/count/0": 96}, step=2)
    assert shown(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5)]  # before it is finished, too
    tracker.finish()
    assert shown(tmp_path, "eval/reward") == [(2, 0.75)]
    assert shown(tmp_path, "age/count/0") == [(2, 96)]


def test_a_run_that_resumes_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    log_run(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3}, began=1000.0)
    log_run(tmp_path, {2: 0.5, 3: 0.6}, began=2000.0)
    assert shown(tmp_path, "reward/mean") == [(1, 0.1), (2, 0.5), (3, 0.6)]


def test_an_evaluation_at_the_start_keeps_the_step_that_it_evaluates(tmp_path: Path) -> None:
    log_run(tmp_path, {1: 0.1, 2: 0.2}, began=1000.0)
    resumed = TensorBoardTracker(tmp_path, clock=lambda: 2000.0)
    resumed.log({"eval/reward": 0.9}, step=1)
    resumed.finish()
    assert shown(tmp_path, "reward/mean") == [(1, 0.1)]


def test_a_full_disk_costs_the_steps_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: M12
    class Full(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    tracker = TensorBoardTracker(tmp_path)
    log_steps(tracker, {1: 0.1})
    assert tracker._records is not None
    whole, tracker._records._writer = tracker._records._writer, io.BufferedWriter(Full())
    with pytest.raises(OSError, match="No space"):
        log_steps(tracker, {2: 0.2})
    whole.close()
    log_steps(tracker, {3: 0.3})
    tracker.finish()
    assert shown(tmp_path, "reward/mean") == [(1, 0.1), (3, 0.3)]


def test_a_place_that_cannot_be_written_costs_a_run_nothing(tmp_path: Path) -> None:
    # covers: M12
    (tmp_path / "file").touch()
    require_that_metrics_are_written(
        ObservabilityArguments(run_dir=tmp_path / "run", use_tensorboard=True, tensorboard_dir=tmp_path / "file")
    )


def test_a_slow_disk_holds_up_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: M12
    release = threading.Event()
    log = TensorBoardTracker.log

    def slow(self: TensorBoardTracker, metrics: Mapping[str, float], *, step: int) -> None:
        release.wait()
        log(self, metrics, step=step)

    monkeypatch.setattr(TensorBoardTracker, "log", slow)
    trackers = open_trackers(ObservabilityArguments(run_dir=tmp_path, use_tensorboard=True), {})
    for step in range(1, 101):  # hangs, if it waits for the disk
        trackers.log({"reward/mean": step / 100}, step=step)
    release.set()
    trackers.finish()
    assert len(shown(tmp_path / "tensorboard", "reward/mean")) == 100


@pytest.mark.parametrize(
    ("flag", "variable", "directory"),
    [(None, "", "run/tensorboard"), (None, "mine", "mine"), ("given", "mine", "given")],
)
def test_the_directory_is_that_of_flag_variable_or_run(flag: str | None, variable: str, directory: str) -> None:
    arguments = ObservabilityArguments(
        run_dir=Path("run"), use_tensorboard=True, tensorboard_dir=Path(flag) if flag else None
    )
    assert tensorboard_directory(arguments, {"TENSORBOARD_DIR": variable}) == Path(directory)
