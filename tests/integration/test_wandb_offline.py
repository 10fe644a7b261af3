"""wandb itself, offline: no network, no key, files in the run directory, nothing raised."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from miles_async.observability.wandb_tracker import INIT_TIMEOUT, WandbOptions, open_wandb

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def test_offline_run_writes_its_files_into_the_run_directory(tmp_path: Path) -> None:
    # covers: M12
    tracker = open_wandb(WandbOptions(directory=tmp_path, group="tests", config={"lr": 5e-4}))
    for step in range(5):
        tracker.log({"reward/mean": step / 10}, step=step)
    tracker.finish()
    assert (tracker.errors, tracker.dropped) == (0, 0)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (record,) = run.glob("run-*.wandb")
    deadline = time.monotonic() + 30  # wandb's own process closes the file shortly after finish has returned
    while b"reward/mean" not in record.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_writers_of_one_run_have_their_own_label_and_share_the_id(tmp_path: Path) -> None:
    # covers: M12
    primary = WandbOptions(directory=tmp_path)
    secondary = WandbOptions(directory=tmp_path, run_id=primary.run_id, label="rank 1", primary=False)
    assert primary.run_id == secondary.run_id
    assert primary.label != secondary.label
    assert primary.init_timeout == INIT_TIMEOUT == 300.0


def test_a_directory_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    # covers: M12
    (tmp_path / "file").write_text("in the way")
    tracker = open_wandb(WandbOptions(directory=tmp_path / "file"))
    tracker.log({"reward/mean": 0.1}, step=0)
    tracker.finish()
