"""wandb itself, offline or without what online needs: files in the run directory, or an error at the start."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import stamina
from wandb.proto.wandb_internal_pb2 import MetricRecord

from examples.quickstart.prepare import main as prepare_quickstart
from miles_async.arguments.observability import ObservabilityArguments, WandbMode
from miles_async.observability import wandb_tracker
from miles_async.observability.background import BackgroundTracker
from miles_async.observability.tracker_parts import TrackedRun
from miles_async.observability.wandb_tracker import COLUMNS, new_run_id, open_wandb
from tests.integration.real_run import REVERSE, ROOT
from tests.unit.samples.sample_rows import write_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def opened(run_dir: Path, mode: WandbMode = "offline", **flags: object) -> BackgroundTracker:
    run = TrackedRun(arguments=ObservabilityArguments(run_dir=run_dir, **flags), settings={"optimizer": {"lr": 5e-4}})
    return open_wandb(run, mode, new_run_id())


def test_offline_run_writes_its_files_into_the_run_directory(tmp_path: Path) -> None:
    # covers: M12
    tracker = opened(tmp_path, wandb_group="tests")
    for step in range(5):
        tracker.log({"reward/mean": step / 10}, step=step)
    tracker.finish()
    assert (tracker.errors, tracker.dropped) == (0, 0)
    _require_files(tmp_path)
    _require_files(tmp_path, MetricRecord(glob_name="*", step_metric="step").SerializeToString())  # the x-axis


def test_samples_are_tables_of_the_run(tmp_path: Path) -> None:
    write_samples(tmp_path, "train", 10)
    tracker = opened(tmp_path, wandb_sample_steps=5)
    tracker.log({"reward/mean": 0.5}, step=10)
    tracker.finish()
    assert (tracker.errors, tracker.dropped) == (0, 0)
    [table] = (tmp_path / "wandb").glob("offline-run-*/files/media/table/samples/train_*.table.json")
    assert json.loads(table.read_text())["columns"] == list(COLUMNS)


def _require_files(run_dir: Path, content: bytes = b"reward/mean") -> None:
    (run,) = (run_dir / "wandb").glob("offline-run-*")
    (record,) = run.glob("run-*.wandb")
    deadline = time.monotonic() + 30  # wandb's own process closes the file shortly after finish has returned
    while content not in record.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_directory_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    # covers: M12
    (tmp_path / "file").write_text("in the way")
    tracker = opened(tmp_path / "file")
    tracker.log({"reward/mean": 0.1}, step=0)
    tracker.finish()


def test_a_run_whose_server_is_out_of_reach_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: M12
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb_tracker, "INIT_TIMEOUT", 1.0)
    with stamina.set_testing(True, attempts=1):
        tracker = opened(tmp_path, mode="online")
        tracker.log({"reward/mean": 0.1}, step=0)
        tracker.finish()
    _require_files(tmp_path)


def test_a_run_without_a_key_is_refused_before_anything_starts(tmp_path: Path) -> None:
    # covers: M12
    prepare_quickstart(["--task", "reverse"])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [*REVERSE, "--wandb-mode", "none", "--run-dir", str(tmp_path / "run"), "--save-hf", "none"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "wandb: there is no API key; run `wandb login` or set WANDB_API_KEY, or stay offline" in done.stderr
    assert not (tmp_path / "run").exists()
