"""Table, figure and verdict of the study, from the results of its cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from examples.staleness_study.cells import AGES, CORRECTIONS, LAST_STEPS, STEPS, CellResult
from miles_async.observability.plots import moving_average

Results = Sequence[CellResult]
TITLES = {
    "uncorrected": "uncorrected",
    "tis": "token TIS, cap 2",
    "ppo-ratio": "PPO ratio against the engines' log-probs",
}
COLORS = {"uncorrected": "#d62728", "tis": "#ff7f0e", "ppo-ratio": "#1f77b4"}
EXPECTED_ORDER = (  # (learns better, learns worse), as (age, correction)
    *(((age, "tis"), (age, "uncorrected")) for age in AGES[1:]),
    *(((age, "ppo-ratio"), (age, "tis")) for age in AGES[1:]),
    ((0, "uncorrected"), (2, "uncorrected")),
    ((2, "uncorrected"), (8, "uncorrected")),
    ((2, "tis"), (8, "tis")),
    ((2, "ppo-ratio"), (8, "ppo-ratio")),
)

PAGE = """\
# What staleness does to learning

Task `sort`, 16 prompts × 8 samples, {steps} steps, {seeds} run(s) per cell, real Megatron and SGLang on CPU.
The engines get the weights of 0, 2 or 8 versions ago (`--debug-publication-lag`), so everything trained on has
exactly that age once so many versions exist. Made by `make study`; see examples/staleness_study/.

Mean sampled reward of the last {last} steps; in brackets greedy accuracy on the 256 test prompts, of the
weights that the engines have at the end.

{table}

![Reward over steps, by age and correction](staleness_study.png)

Orderings that simulation had led us to expect, checked on this data:

{verdict}

That is why asynchronous training with neither `--use-rollout-logprobs` (the PPO ratio) nor `--use-tis` is
refused, unless `--allow-uncorrected-off-policy` says that it is intended.
"""


def write_report(results: Results, docs: Path) -> None:
    """Writes ``docs``/staleness_study.md and .png."""
    docs.mkdir(parents=True, exist_ok=True)
    page = PAGE.format(
        steps=STEPS,
        last=LAST_STEPS,
        seeds=len({result.cell.seed for result in results}),
        table=table(results),
        verdict="\n".join(f"- {line}" for line in verdict(results)),
    )
    (docs / "staleness_study.md").write_text(page)
    draw(results, docs / "staleness_study.png")


def table(results: Results) -> str:
    """The results as a Markdown table; cells that were not run are dashes."""
    lines = [f"| versions old | {' | '.join(TITLES.values())} |", "|---|" + "---|" * len(TITLES)]
    for age in AGES:
        entries = []
        for correction in CORRECTIONS:
            runs = _runs(results, age, correction)
            reward, greedy = (
                (mean(run.last_reward for run in runs), mean(run.greedy for run in runs)) if runs else (0, 0)
            )
            entries.append(f"{reward:.2f} ({greedy:.2f})" if runs else "–")
        lines.append(f"| {age} | {' | '.join(entries)} |")
    return "\n".join(lines)


def verdict(results: Results) -> Iterator[str]:
    """One line per expected ordering that can be judged: does it hold here?"""
    for better, worse in EXPECTED_ORDER:
        high, low = _runs(results, *better), _runs(results, *worse)
        if high and low:
            above, below = mean(run.last_reward for run in high), mean(run.last_reward for run in low)
            holds = "holds" if above > below else "DOES NOT HOLD"
            yield f"{_label(better)} {above:.2f} > {_label(worse)} {below:.2f}: {holds}"


def draw(results: Results, path: Path) -> None:
    """One panel per age above 0, on-policy in grey in each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, age in zip(figure.subplots(1, len(AGES) - 1, sharey=True), AGES[1:], strict=True):
        for run in _runs(results, 0, "uncorrected"):
            axes.plot(moving_average(run.rewards), color="#999999", linewidth=1.5, label="on-policy (age 0)")
        for correction, color in COLORS.items():
            for run in _runs(results, age, correction):
                axes.plot(moving_average(run.rewards), color=color, linewidth=1.8, label=TITLES[correction])
        axes.set_title(f"{age} versions old", fontsize="medium")
        axes.set_xlabel("step")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("reward, mean of 5 steps")
    labelled = dict(zip(*reversed(figure.axes[-1].get_legend_handles_labels()), strict=True))  # one per label
    figure.legend(
        labelled.values(),
        labelled.keys(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize="small",
    )
    figure.savefig(path, dpi=150)


def _runs(results: Results, age: int, correction: str) -> list[CellResult]:
    return [result for result in results if (result.cell.age, result.cell.correction) == (age, correction)]


def _label(cell: tuple[int, str]) -> str:
    return f"{cell[1]} at age {cell[0]}" if cell[0] else "on-policy"
