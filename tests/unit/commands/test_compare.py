"""``miles-async compare``: flags that differ, and curves on one scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.observability.metrics_file import FILE_NAME, MetricsFile
from tests.unit.commands.command_line import printed, refused
from tests.unit.commands.run_directories import write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    fast = Arguments(optimizer=OptimizerArguments(lr=1e-3))
    slow = Arguments(optimizer=OptimizerArguments(lr=1e-5))
    runs = [
        write_run(tmp_path / "fast", [0.1, 0.4, 0.7, 1.0], fast),
        write_run(tmp_path / "slow", [0.1, 0.1], slow),
    ]
    file = MetricsFile(runs[0] / FILE_NAME)
    for step, reward in ((0, 0.2), (4, 0.9)):
        file.log({"eval/reward": reward}, step=step)
    file.finish()
    return [str(run) for run in runs]


def test_flags_that_differ_and_curves_are_shown(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in printed(capsys, "compare", *runs).splitlines()]
    flags = [line for line in lines if line and line[0].startswith("--")]
    assert flags == [["--lr", "0.001", "1e-05"]]
    place = lines.index(["reward/mean", "fast", "▁▃▆█", "0.1", "1", "0.55"])
    assert lines[place + 1] == ["slow", "▁▁", "0.1", "0.1", "0.1"], "on the scale of the other"
    assert ["eval/reward", "fast", "▁█", "0.2", "0.9"] in lines, "no mean of few"
    assert ["time/step_seconds", "fast", "▁▁▁▁", "2", "2", "2"] in lines


def test_a_metric_that_was_never_a_number_is_none_that_runs_have(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = MetricsFile(Path(runs[0]) / FILE_NAME)
    file.log({"train/loss": float("nan")}, step=4)
    file.finish()
    assert "--metric train/loss: no run has it" in refused(capsys, "compare", *runs, "--metric", "train/loss")


def test_chosen_metrics_are_drawn(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.png"
    shown = printed(capsys, "compare", *runs, "--metric", "age/max", "eval/reward", "--output", str(picture))
    assert "age/max" in shown
    assert "reward/mean" not in shown
    assert shown.endswith(f"wrote {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_long_curve_is_of_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name, [step / 399 for step in range(400)])) for name in "ab"]
    shown = printed(capsys, "compare", *runs)
    assert "no flag differs" in shown
    assert "▁▁▁▁▁▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇█████" in shown


def test_supervised_runs_have_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for name in ("a", "b"):
        run_dir = write_run(tmp_path / name, rewards=())
        (run_dir / FILE_NAME).write_text('{"kind": "step", "step": 1, "train/loss": 0.5, "time/step_seconds": 1}\n')
        runs.append(str(run_dir))
    assert "train/loss" in printed(capsys, "compare", *runs)


def test_runs_that_cannot_be_compared_are_one_line(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = write_run(tmp_path / "empty", rewards=())
    (tmp_path / "other").mkdir()
    for words, message in [
        (runs[:1], "expected two run directories or more, found one"),
        ([runs[0], str(tmp_path / "slw")], f"did you mean {runs[1]}?"),
        ([runs[0], str(tmp_path / "other")], "expected a run directory with a run.json"),
        ([runs[0], str(empty)], f"{empty}: this run has trained no step yet"),
        ([*runs, "--metric", "reward/men"], "--metric reward/men: no run has it; did you mean reward/mean?"),
        ([*runs, "--output", "curves.svg"], "--output curves.svg: expected a name that ends with .png"),
        ([*runs, "--output", str(tmp_path / "no" / "x.png")], f"--output {tmp_path / 'no' / 'x.png'}: "),
    ]:
        [line] = refused(capsys, "compare", *words).splitlines()
        assert message in line
