"""Ids of trackers outlive the run directory that a restart moves aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.observability.tracker_parts import earlier_run_id, save_run_id
from miles_async.runtime.processes.restarts import RESTARTS_VARIABLE
from tests.unit.observability.tracked import restarted


def test_the_newest_start_that_had_an_id_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts = [tmp_path / name for name in ("first", "second", "third")]
    for path in starts:
        path.mkdir()
    save_run_id(starts[0], "wandb", "a")
    save_run_id(starts[1], "wandb", "b")  # the third one ended before it had one
    restarted(monkeypatch, *starts)
    assert earlier_run_id("wandb") == "b"
    assert earlier_run_id("mlflow") is None


def test_a_run_that_was_never_restarted_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RESTARTS_VARIABLE, raising=False)
    assert earlier_run_id("wandb") is None


def test_a_directory_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    save_run_id(tmp_path / "missing", "wandb", "a")
