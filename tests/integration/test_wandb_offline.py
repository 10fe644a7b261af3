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
from miles_async.observability.wandb_tracker import COLUMNS, INIT_TIMEOUT, WandbOptions, open_wandb
from tests.integration.real_run import REVERSE, ROOT
from tests.unit.samples.sample_rows import write_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def test_offline_run_writes_its_files_into_the_run_directory(tmp_path: Path) -> None:
    # covers: M12
    tracker = open_wandb(WandbOptions(directory=tmp_path, group="tests", config={"lr": 5e-4}))
    for step in range(5):
        tracker.log({"reward/mean": step / 10}, step=step)
    tracker.finish()
    assert (tracker.errors, tracker.dropped) == (0, 0)
    _require_files(tmp_path)
    _require_files(tmp_path, MetricRecord(glob_name="*", step_metric="step").SerializeToString())  # the x-axis


def test_samples_are_tables_of_the_run(tmp_path: Path) -> None:
    write_samples(tmp_path, "train", 10)
    tracker = open_wandb(WandbOptions(directory=tmp_path, sample_steps=5))
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


def test_a_run_whose_server_is_out_of_reach_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: M12
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with stamina.set_testing(True, attempts=1):
        tracker = open_wandb(WandbOptions(directory=tmp_path, mode="online", init_timeout=1.0))
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
