"""``reward.png``: the run at a glance.

Drawn from metrics.jsonl alone, so that it can be drawn again at any time, with
``python -m miles_async.observability.plots runs/quickstart``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from miles_async.observability.metrics_file import AGE_COUNT, FILE_NAME, kind_of, read_metrics
from miles_async.observability.progress_state import AVERAGE_WINDOW
from miles_async.types import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_STRETCHES = 400  # of steps, in the plot of ages
REWARD_COLOR, EVAL_COLOR = "#1f77b4", "#d62728"
Rows = Sequence[JsonObject]


def plot_run(run_dir: Path) -> Path:
    """Draw ``run_dir``/metrics.jsonl into ``run_dir``/reward.png and return that path.

    Raises FileNotFoundError without metrics.jsonl and ValueError if it has no trained step.
    """
    from matplotlib.figure import Figure  # slow to import; needs no display, unlike pyplot
    from matplotlib.ticker import MaxNLocator

    rows = read_metrics(run_dir / FILE_NAME)
    if not any("reward/mean" in row for row in rows):
        raise ValueError(f"{run_dir / FILE_NAME} has no step with reward/mean: nothing was trained yet")
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1]})
    draw_reward(upper, rows)
    draw_ages(lower, rows)
    lower.set_xlabel("step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    output = run_dir / "reward.png"
    figure.savefig(output, dpi=150)
    return output


def plot_curves(runs: Mapping[str, Rows], metrics: Sequence[str], output: Path) -> None:
    """Draw each metric of all runs over the steps, with moving averages, one below the other. Raises OSError."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 1 + 2.5 * len(metrics)), layout="constrained")
    for axes, metric in zip(figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0], metrics, strict=True):
        for number, (name, rows) in enumerate(runs.items()):
            steps, values = series(rows, metric)
            color = f"C{number}"
            if is_of_steps(metric):
                axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
                axes.plot(steps, moving_average(values), color=color, linewidth=2, label=name)
            else:
                axes.plot(steps, values, "o-", color=color, markersize=4, label=name)
        axes.set_ylabel(metric)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[0].legend(frameon=False, fontsize="small")
    figure.savefig(output, dpi=150)


def draw_reward(axes: Axes, rows: Rows) -> None:
    """Draw the reward per step, its moving average, and the evaluations."""
    steps, rewards = series(rows, "reward/mean")
    axes.plot(steps, rewards, color=REWARD_COLOR, alpha=0.3, linewidth=1, label="reward, per step")
    label = f"reward, mean of {AVERAGE_WINDOW} steps"
    axes.plot(steps, moving_average(rewards), color=REWARD_COLOR, linewidth=2, label=label)
    evaluated, eval_rewards = series(rows, "eval/reward")
    if evaluated:
        axes.plot(evaluated, eval_rewards, "o", color=EVAL_COLOR, markersize=5, label="mean held-out reward")
    axes.set_ylim(min(0.0, *rewards) - 0.02, max(1.0, *rewards) + 0.03)
    axes.set_ylabel("reward")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right", fontsize="small")


def draw_ages(axes: Axes, rows: Rows) -> None:
    """Draw samples per age, stacked, over the steps.

    A long run has means over stretches of steps: every step would take minutes, and be narrower than a pixel.
    """
    import matplotlib

    names = {name for row in rows for name in row if name.startswith(AGE_COUNT)}
    ages = sorted(int(name.removeprefix(AGE_COUNT)) for name in names)
    colors = matplotlib.colormaps["viridis_r"]
    trained = [row for row in rows if "reward/mean" in row]
    width = math.ceil(len(trained) / MOST_STRETCHES)
    stretches = [trained[start : start + width] for start in range(0, len(trained), width)]
    edges = [*(stretch[0]["step"] - 0.5 for stretch in stretches), trained[-1]["step"] + 0.5]
    bottom = [0.0] * len(stretches)
    for age in ages:
        counts = [sum(row.get(f"{AGE_COUNT}{age}") or 0.0 for row in each) / len(each) for each in stretches]
        top = [low + count for low, count in zip(bottom, counts, strict=True)]
        color = colors(0.15 + 0.75 * age / max(ages[-1], 2))
        axes.stairs(top, edges, baseline=bottom, fill=True, color=color, label=f"age {age}")
        bottom = top
    axes.set_ylabel("samples by age")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small", ncols=6, loc="lower right", bbox_to_anchor=(1.0, 0.98))


def is_of_steps(metric: str) -> bool:
    """True for metrics of steps, which swing; evaluations and checkpoints are few, and a mean would hide the last."""
    return kind_of({metric: None}) == "step"


def moving_average(values: npt.ArrayLike, window: int = AVERAGE_WINDOW) -> npt.NDArray[np.float64]:
    """Mean of each value and up to ``window - 1`` before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - window)
    averages: npt.NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return averages


def series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a metric, where it was measured."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def main(words: Sequence[str]) -> None:
    """Draw the run that ``words`` name and print the path. SystemExit with a message if that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m miles_async.observability.plots",
        description="Draw reward.png of a run again, from its metrics.jsonl.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run: --run-dir of train")
    run_dir = parser.parse_args(words).run_dir
    try:
        print(plot_run(run_dir))
    except FileNotFoundError:
        parser.error(f"{run_dir}: expected the directory of a run, found no {FILE_NAME} there")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
