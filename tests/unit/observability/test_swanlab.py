"""SwanLab's own files have what was logged; a server that is gone costs a run nothing, and no question is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.swanlab_tracker import swanlab_mode
from tests.extras import needs

needs_swanlab = needs("swanlab")

ROOT = Path(__file__).parents[3]
RUN = """
import sys
from pathlib import Path
from miles_async.arguments.observability import ObservabilityArguments
from miles_async.observability.trackers import open_trackers

hook = sys.excepthook
arguments = ObservabilityArguments(run_dir=Path(sys.argv[1]), use_swanlab=True, swanlab_mode=sys.argv[2])
trackers = open_trackers(arguments, {"optimizer": {"lr": 1e-6}})
for step in (1, 2):
    trackers.log({"reward/mean": step / 10, "eval/gsm8k/pass@4": 0.5, "train/loss": float("nan")}, step=step)
trackers.finish()
assert sys.excepthook is hook, "a run that fails would wait for SwanLab"
"""


def run(run_dir: Path, mode: str, **environment: str) -> None:
    """Log two steps in a process that could ask its user nothing."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(run_dir), mode],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(run_dir.parent), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert '"reward/mean": 0.2' in (run_dir / "metrics.jsonl").read_text()


def records(run_dir: Path) -> list[bytes]:
    """Records of the run's file, as SwanLab's own reader finds them; each a message of protobuf."""
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    [path] = (run_dir / "swanlog").glob("run-*/run-*.swanlab")
    reader = DataStoreReader()
    reader.open(str(path))
    found = list(reader)
    reader.close()
    return found


@needs_swanlab
def test_offline_every_metric_of_every_step_is_in_the_run_directory(tmp_path: Path) -> None:
    run(tmp_path / "latest", "offline")
    found = records(tmp_path / "latest")
    for name in (b"reward/mean", b"eval/gsm8k/pass@4"):
        assert len([record for record in found if name in record]) >= 2
    [config] = (tmp_path / "latest" / "swanlog").glob("run-*/files/config.yaml")
    assert "1e-06" in config.read_text()
    assert (tmp_path / "latest" / "swanlab_run_id").read_text().strip()


@needs_swanlab
def test_without_a_key_a_run_goes_offline_and_asks_nothing(tmp_path: Path) -> None:
    # covers: M12
    run(tmp_path / "latest", "online", SWANLAB_API_KEY="")
    assert any(b"reward/mean" in record for record in records(tmp_path / "latest"))
    assert not (tmp_path / "latest" / "swanlab_run_id").exists()  # a restart has nothing to continue online


@needs_swanlab
def test_a_directory_that_cannot_be_written_costs_a_run_nothing(tmp_path: Path) -> None:
    # covers: M12
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "swanlog").touch()
    run(tmp_path / "latest", "offline")


@pytest.mark.parametrize(
    ("flag", "variable", "mode"),
    [(None, "", "online"), (None, "cloud", "online"), ("online", "offline", "online")],
)
def test_it_is_online_unless_flag_or_variable_says_otherwise(flag: str | None, variable: str, mode: str) -> None:
    arguments = ObservabilityArguments(use_swanlab=True, swanlab_mode=flag)
    assert swanlab_mode(arguments, {"SWANLAB_MODE": variable}) == mode
