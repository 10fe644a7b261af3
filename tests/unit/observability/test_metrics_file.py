"""metrics.jsonl: what is written can be read, whatever happened to the run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from miles_async.observability.metrics_file import MetricsFile, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def test_one_object_per_step_flushed_at_once(path: Path) -> None:
    file = MetricsFile(path, clock=lambda: 12.5)
    file.log({"reward/mean": 0.25, "age/max": np.float32(1)}, step=3)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [  # before finish: a kill loses nothing
        {"kind": "step", "step": 3, "time": 12.5, "reward/mean": 0.25, "age/max": 1.0}
    ]
    file.finish()


def test_numbers_that_json_does_not_know_become_null(path: Path) -> None:
    file = MetricsFile(path)
    file.log({"reward/mean": float("nan"), "train/grad_norm": float("inf")}, step=0)
    file.finish()
    row = read_metrics(path)[0]
    assert (row["reward/mean"], row["train/grad_norm"]) == (None, None)


def test_lines_of_one_step_are_merged_and_a_resumed_run_overrides(path: Path) -> None:
    first = MetricsFile(path)
    first.log({"reward/mean": 0.1}, step=0)
    first.log({"reward/mean": 0.9}, step=1)  # trained after the checkpoint that is resumed from
    first.finish()
    resumed = MetricsFile(path)
    resumed.log({"reward/mean": 0.2}, step=1)
    resumed.log({"eval/reward": 0.5}, step=1)
    resumed.finish()
    rows = read_metrics(path)
    assert [row["reward/mean"] for row in rows] == [0.1, 0.2]
    assert rows[1]["eval/reward"] == 0.5


def test_each_line_says_what_it_is_about(path: Path) -> None:
    file = MetricsFile(path)
    file.log({"reward/mean": 0.1, "time/step_seconds": 2.0}, step=1)
    file.log({"sft/epoch": 0.0}, step=2)
    file.log({"eval/addition/reward/mean": 0.5, "eval/reward": 0.5}, step=2)
    file.log({"checkpoint/write_seconds": 3.0}, step=2)
    file.finish()
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["step", "step", "evaluation", "checkpoint"]
    assert all("kind" not in row for row in read_metrics(path)), "a merged row has several"


def test_a_torn_last_line_is_left_out(path: Path) -> None:
    file = MetricsFile(path)
    file.log({"reward/mean": 0.1}, step=0)
    file.finish()
    with path.open("a") as torn:
        torn.write('{"step": 1, "rew')
    assert [row["step"] for row in read_metrics(path)] == [0]


def test_logging_after_the_end_or_on_a_full_disk_raises_nothing(path: Path) -> None:
    # covers: M12
    file = MetricsFile(path)
    file.finish()
    file.finish()
    file.log({"reward/mean": 0.1}, step=0)
    full = MetricsFile(Path("/dev/full"))
    full.log({"reward/mean": 0.1}, step=0)
    full.log({"reward/mean": 0.1}, step=1)
