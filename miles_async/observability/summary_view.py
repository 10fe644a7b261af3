"""Print the summary of a run: a table on a terminal, aligned lines elsewhere."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from miles_async.observability.progress_state import AVERAGE_WINDOW, MISSING, duration
from miles_async.observability.summary import Summary


def print_summary(summary: Summary, run_dir: Path, *, console: Console | None = None) -> None:
    console = console or Console()
    rows = [*summary_rows(summary), ("written to", f"{run_dir} (summary.json, metrics.jsonl, reward.png)")]
    if console.is_terminal:
        table = Table(title="Run summary", show_header=False, title_justify="left", border_style="dim")
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for label, text in rows:
            table.add_row(label, text)
        console.print(table)
        return
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        console.out(f"{label:<{width}}  {text}", highlight=False)  # out: never wraps


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return (label, text) of each line."""
    publish, difference = summary["publish"], summary["logprob_diff"]
    wall = duration(summary["wall_seconds"])
    reward = f"{_number(summary['reward_first'])} → {_number(summary['reward_last'])}"
    eval_reward = f"{_number(summary['eval_reward_first'])} → {_number(summary['eval_reward_last'])}"
    trainer_idle, rollout_idle = summary["trainer_idle_fraction"], summary["rollout_idle_fraction"]
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary["stage_seconds"].items())
    restarts = [("restart", f"{restart['reason']} ({restart['run_dir']})") for restart in summary.get("restarts", ())]
    if summary["reward_first"] is None:  # supervised fine-tuning
        return [("steps", f"{summary['steps']} in {wall}"), ("seconds by stage", stages or MISSING), *restarts]
    return [
        ("steps", f"{summary['steps']} in {wall}, weight version {summary['weight_version']}"),
        ("reward", f"{reward} (mean of the last {AVERAGE_WINDOW} steps)"),
        ("eval reward", eval_reward),
        ("age of trained samples", _ages(summary)),
        ("balance", balance_line(summary)),
        ("idle", f"trainer {_percent(trainer_idle)}, rollout {_percent(rollout_idle)}"),
        (
            "publications",
            f"{publish['count']}, mean pause {_number(publish['pause_seconds_mean'])} s, "
            f"mean prepare {_number(publish['prepare_seconds_mean'])} s",
        ),
        (
            "engine − trainer",
            f"log-probs differ by {_number(difference['mean'], '.2e')} on average, "
            f"{_number(difference['max'], '.2e')} at most",
        ),
        ("seconds by stage", stages or MISSING),
        *restarts,
    ]


def balance_line(summary: Summary) -> str:
    """``issued 652 = trained 640 + recycled 3 + ... ``, or ``≠`` if it does not add up (C2)."""
    groups = dict(summary["groups"])
    issued = groups.pop("issued")
    shown = {name: count for name, count in groups.items() if count or name == "trained"}
    terms = " + ".join(f"{name.replace('_', ' ')} {count}" for name, count in shown.items())
    return f"issued {issued} {'=' if summary['balanced'] else '≠'} {terms} groups"


def _ages(summary: Summary) -> str:
    histogram = summary["age_histogram"]
    counts = ", ".join(f"{age}: {count}" for age, count in histogram.items())
    return f"max {summary['age_max']} (samples per age: {counts})" if histogram else MISSING


def _number(value: float | None, form: str = ".3f") -> str:
    return MISSING if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0%}"
