"""The staleness study: its cells are valid runs, finished cells are recognised, the report says what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.staleness_study.cells import STEPS, Cell, CellResult, read_result, study_cells
from examples.staleness_study.report import table, verdict, write_report
from examples.staleness_study.study import main
from miles_async.arguments.parser import parse_arguments
from miles_async.observability.metrics_file import MetricsFile

ROOT = Path(__file__).parents[3]


def result(age: int, correction: str, reward: float, seed: int = 0) -> CellResult:
    cell = Cell(age=age, correction=correction, seed=seed)
    return CellResult(cell=cell, rewards=(0.2, *[reward] * 10), greedy=reward + 0.1, age_histogram={str(age): 1})


def finish(run_dir: Path, steps: int = STEPS) -> None:
    file = MetricsFile(run_dir / "metrics.jsonl")
    for step in range(steps):
        file.log({"reward/mean": 0.5}, step=step)
    file.finish()
    summary = {"steps": steps, "eval_accuracy_last": 0.75, "age_histogram": {"0": 5}}
    (run_dir / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize("cell", list(study_cells(1)), ids=lambda cell: cell.name)
def test_each_cell_forces_its_age_and_uses_its_correction(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = parse_arguments(cell.flags(Path("runs/study/x"))).arguments
    assert arguments.weights.debug_publication_lag == cell.age == arguments.staleness.bound
    assert arguments.staleness.lead == 1
    assert arguments.algorithm.use_tis == (cell.correction == "tis")
    assert arguments.algorithm.use_rollout_logprobs == (cell.correction == "ppo-ratio")


def test_only_a_whole_run_counts_as_finished(tmp_path: Path) -> None:
    cell = Cell(age=0, correction="uncorrected", seed=0)
    assert read_result(cell, tmp_path) is None
    finish(tmp_path / "half", steps=STEPS - 1)
    assert read_result(cell, tmp_path / "half") is None
    finish(tmp_path / "whole")
    whole = read_result(cell, tmp_path / "whole")
    assert whole is not None
    assert (whole.last_reward, whole.greedy) == (0.5, 0.75)


def test_table_averages_over_seeds_and_shows_dashes_for_missing_cells() -> None:
    lines = table([result(2, "tis", 0.6), result(2, "tis", 0.8, seed=1)]).splitlines()
    assert lines[3] == "| 2 | – | 0.70 (0.80) | – |"
    assert lines[2].count("–") == 3


def test_verdict_judges_only_what_was_run() -> None:
    lines = list(verdict([result(8, "uncorrected", 0.3), result(8, "tis", 0.6), result(8, "ppo-ratio", 0.5)]))
    assert lines == [
        "tis at age 8 0.60 > uncorrected at age 8 0.30: holds",
        "ppo-ratio at age 8 0.50 > tis at age 8 0.60: DOES NOT HOLD",
    ]


def test_report_only_writes_page_and_figure_and_says_that_cells_are_missing(tmp_path: Path) -> None:
    arguments = ["--report-only", "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs")]
    assert main(arguments) == 1
    finish(tmp_path / "runs" / "age0-uncorrected-seed0")
    assert main(arguments) == 1
    assert "| 0 | 0.50 (0.75) | – | – |" in (tmp_path / "docs" / "staleness_study.md").read_text()
    assert (tmp_path / "docs" / "staleness_study.png").stat().st_size > 1000


def test_report_of_a_whole_study(tmp_path: Path) -> None:
    write_report([result(cell.age, cell.correction, 0.5) for cell in study_cells(1)], tmp_path)
    assert "DOES NOT HOLD" in (tmp_path / "staleness_study.md").read_text()
