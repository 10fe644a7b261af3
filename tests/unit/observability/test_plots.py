"""reward.png is drawn from metrics.jsonl alone; the recorder feeds all that the plot and the summary need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from miles_async.observability.metrics_file import MetricsFile, read_metrics
from miles_async.observability.plots import MOST_STRETCHES, draw_ages, main, moving_average, plot_run
from miles_async.observability.progress import Progress
from miles_async.observability.progress_state import ProgressState
from miles_async.observability.recorder import RunRecorder
from miles_async.observability.summary import RunSummary

PNG = b"\x89PNG"


@dataclass
class FakePublication:
    version: int
    prepare_seconds: float = 0.1
    pause_seconds: float = 0.2


def record_run(directory: Path) -> RunSummary:
    lines: list[str] = []
    file, summary = MetricsFile(directory / "metrics.jsonl"), RunSummary()
    recorder = RunRecorder(file, Progress(ProgressState(3), lines.append), summary)
    recorder.evaluation(0, {"eval/reward": 0.0})
    recorder.evaluation(0, {})
    for step in (1, 2, 3):
        recorder.step(step, {"reward/mean": 0.0 if step == 1 else 0.5}, {0: 4, 1: step})
        recorder.publication(FakePublication(step))
    recorder.evaluation(3, {"eval/reward": 1.0})
    file.finish()
    return summary


def test_a_recorded_run_can_be_plotted_and_summarised(tmp_path: Path) -> None:
    result = record_run(tmp_path).finish({}, wall_seconds=1.0, weight_version=3)
    assert plot_run(tmp_path) == tmp_path / "reward.png"
    assert (tmp_path / "reward.png").read_bytes().startswith(PNG)
    assert (result["eval_reward_first"], result["eval_reward_last"]) == (0.0, 1.0)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[2]["age/count/1"] == 2


def test_an_evaluation_of_some_data_sets_is_kept_and_is_no_mean_over_all(tmp_path: Path) -> None:
    lines: list[str] = []
    file, summary = MetricsFile(tmp_path / "metrics.jsonl"), RunSummary()
    recorder = RunRecorder(file, Progress(ProgressState(3), lines.append), summary)
    recorder.evaluation(0, {"eval/reward": 0.5})
    recorder.evaluation(1, {"eval/aime/reward/mean": 1.0})
    file.finish()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row.get("eval/aime/reward/mean")) for row in rows] == [(0, None), (1, 1.0)]
    assert summary.finish({}, wall_seconds=1.0, weight_version=1)["eval_reward_last"] == 0.5
    assert len([line for line in lines if "evaluation after" in line]) == 1


def test_the_command_draws_one_run_and_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(tmp_path)
    main([str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path / 'reward.png'}\n"
    for words, code, message in [
        (["--help"], 0, "RUN_DIR"),
        ([], 2, "the following arguments are required: RUN_DIR"),
        ([str(tmp_path), "other"], 2, "unrecognized arguments: other"),
        ([str(tmp_path / "none")], 2, f"{tmp_path / 'none'}: expected the directory of a run, found no metrics.jsonl"),
    ]:
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == code
        shown = capsys.readouterr()
        assert message in shown.out + shown.err


def test_steps_are_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of three steps has no step 0.5."""
    record_run(tmp_path)
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_run(tmp_path)
    ticks = drawn[0].axes[1].get_xticks()
    assert len(ticks) > 1
    assert all(tick == round(tick) for tick in ticks)


@pytest.mark.parametrize("steps", [3, 10_000])
def test_ages_of_a_long_run_are_few_shapes_over_all_its_steps(steps: int) -> None:
    axes = Figure().subplots()
    draw_ages(
        axes, [{"step": step, "reward/mean": 0.5, "age/count/0": 4, "age/count/1": 8} for step in range(1, steps + 1)]
    )
    shapes = axes.patches
    assert len(shapes) == 2
    for shape, top in zip(shapes, (4, 12), strict=True):
        assert isinstance(shape, StepPatch)
        values, edges, _ = shape.get_data()
        assert set(values) == {top}
        assert len(values) <= min(steps, MOST_STRETCHES)
        assert (edges[0], edges[-1]) == (0.5, steps + 0.5)


def test_a_run_without_age_histograms_is_plotted_too(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log({"reward/mean": 0.5, "age/mean": 1.0, "age/max": 2.0}, step=0)
    file.finish()
    assert plot_run(tmp_path).read_bytes().startswith(PNG)


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log({"eval/reward": 0.1}, step=0)
    file.finish()
    with pytest.raises(ValueError, match="nothing was trained yet"):
        plot_run(tmp_path)


def test_moving_average_starts_with_what_there_is() -> None:
    assert moving_average([1.0, 0.0, 0.5, 0.5], window=2).tolist() == [1.0, 0.5, 0.25, 0.5]
    assert moving_average([]).tolist() == []
