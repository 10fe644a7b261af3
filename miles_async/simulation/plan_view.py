"""The plan for people: a table, a recommendation in words, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from miles_async.simulation.plan import CPU_SECONDS_PER_SAMPLE, GOOD_ENOUGH, MOST_WASTE, Prediction, Refusal, Row
from miles_async.simulation.result import BOUND, SimulationResult

MOST_USE = 0.7  # of a core: beyond that the timers of an event loop are late
BOTTLENECK = 0.1  # a side that is idle for more of the time waits for the other

COLUMNS = ("flags", "step\ns", "×\nbound", "trainer\nidle", "engine\nidle", "age\nmean", "age\nmax", "stale", "waste")


def plan_table(rows: Sequence[Row], recommended: Prediction | None) -> Table:
    """One line per candidate; the recommended one is marked."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, caption_justify="left")
    for name in COLUMNS:
        flags = name == "flags"  # what gives way in a narrow terminal
        table.add_column(name, justify="left" if flags else "right", no_wrap=not flags)
    for row in rows:
        style = "bold green" if row is recommended else None
        if isinstance(row, Refusal):
            table.add_row(_short(row.label), "refused", style="red")
        else:
            table.add_row(_short(row.label), *_cells(row.result), style=style)
    table.caption = (
        f"bound: {BOUND}. engines idle: slots × time in which nothing is generated. "
        "stale: attempts recycled or dropped. waste: tokens generated and not trained."
    )
    return table


def _short(label: str) -> str:
    """One flag per line: the table has to fit into 80 columns."""
    return label.replace(" --", "\n").removeprefix("--")


def _cells(result: SimulationResult) -> list[str]:
    return [
        f"{result.step_seconds:.4g}",
        f"{result.step_seconds / result.bound_seconds:.2f}",
        f"{result.trainer_idle_fraction:.0%}",
        f"{max(0.0, result.slot_idle_fraction):.0%}",
        f"{result.mean_age:.2f}",
        f"{max(result.ages)}",
        f"{result.stale_fraction:.1%}",
        f"{max(0.0, result.wasted_fraction):.1%}",
    ]


def plan_text(rows: Sequence[Row], recommended: Prediction | None) -> str:
    """Recommend a candidate, and list the refused ones with reasons."""
    lines = [f"Refused: {row.label}: {row.reason}" for row in rows if isinstance(row, Refusal)]
    if recommended is not None:
        lines.append(_recommendation(recommended.label, recommended.result))
        lines.append(rollout_process_text(recommended.rollout_cores))
    return "".join(f"{line}\n" for line in lines)


def _recommendation(label: str, result: SimulationResult) -> str:
    advice = ""
    if result.trainer_idle_fraction > BOTTLENECK:
        advice = f" The trainer waits {result.trainer_idle_fraction:.0%} of the time: generation is the bottleneck."
        if result.slot_idle_fraction > 2 * BOTTLENECK:
            advice += (
                f" And yet {result.slot_idle_fraction:.0%} of the engines' slots are idle: stragglers, a lead that is "
                "too small, or requests spread unevenly (--sglang-router-policy)."
            )
    elif result.slot_idle_fraction > BOTTLENECK:
        advice = f" Slots are idle {result.slot_idle_fraction:.0%} of the time: training is the bottleneck."
    thrifty = f", among settings that throw away less than {MOST_WASTE:.0%} of the tokens"
    if result.wasted_fraction >= MOST_WASTE:
        thrifty = ""
        advice += (
            f" {result.wasted_fraction:.1%} of the tokens are thrown away: try a higher bound (--max-weight-staleness) "
            "with the same lead (--max-rollout-lead)."
        )
    return (
        f"Recommended: {label or 'the flags as given'}: {result.step_seconds:.4g} s per step, "
        f"{result.step_seconds / result.bound_seconds:.2f} × the bound of {result.bound_seconds:.4g} s "
        f"(T_rollout {result.rollout_seconds:.4g}, T_pause {result.pause_seconds:.4g}, "
        f"T_train {result.train_seconds:.4g}, T_copy {result.copy_seconds:.4g}), mean age {result.mean_age:.2f}: the "
        f"smallest age within {GOOD_ENOUGH - 1:.0%} of the fastest{thrifty}.{advice}"
    )


def rollout_process_text(cores: float) -> str:
    """Say which share of a core the rollout process needs, and whether that is too much."""
    found = (
        f"The rollout process needs {cores:.0%} of a core, at {1e3 * CPU_SECONDS_PER_SAMPLE:g} ms per sample, "
        "which the simulation leaves out."
    )
    if cores < MOST_USE:
        return found
    return f"{found} Above {MOST_USE:.0%} it is the bottleneck: steps will take longer than predicted."


def plot_plan(rows: Sequence[Row], recommended: Prediction | None, output: Path) -> None:
    """Step times against the bound, idle fractions, ages; as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and no display is needed
    from matplotlib.figure import Figure

    shown = [row for row in rows if isinstance(row, Prediction)]
    results = [row.result for row in shown]
    places = range(len(shown))
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, sharey=True, gridspec_kw={"width_ratios": [2, 1.4, 1]})
    colors = ["#2ca02c" if row is recommended else "#1f77b4" for row in shown]
    left.barh(places, [result.step_seconds for result in results], color=colors)
    bounds = [result.bound_seconds for result in results]
    left.plot(bounds, list(places), "|", color="black", markersize=14, label="bound")
    left.set_yticks(list(places), [_short(row.label) for row in shown], fontsize="small")
    left.set_xlabel("seconds per step")
    left.legend(frameon=False, fontsize="small")
    trainer = [result.trainer_idle_fraction for result in results]
    engines = [result.slot_idle_fraction for result in results]
    middle.barh([place - 0.2 for place in places], trainer, 0.4, color="#d62728", label="trainer")
    middle.barh([place + 0.2 for place in places], engines, 0.4, color="#ff7f0e", label="engines")
    middle.set_xlabel("idle fraction")
    middle.set_xlim(0, 1)
    middle.legend(frameon=False, fontsize="small")
    right.barh(places, [result.mean_age for result in results], color=colors)
    right.set_xlabel("mean age")
    left.invert_yaxis()
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=150)
