"""``miles-async compare``: the flags in which runs differ, and their curves."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from miles_async.arguments.words import did_you_mean
from miles_async.commands.parser import CommandParser
from miles_async.commands.tables import printed
from miles_async.errors import ConfigurationError
from miles_async.observability.metrics_file import FILE_NAME
from miles_async.observability.plots import is_of_steps, moving_average, plot_curves, series
from miles_async.observability.progress_state import AVERAGE_WINDOW, MISSING, sparkline
from miles_async.runtime.files.run_directory import CONFIG_FILE, check_directory
from miles_async.runtime.processes.run_process import read_run_process
from miles_async.types import JsonObject
from miles_async.watch.status import read_rows
from miles_async.watch.views.flags import PLACE, as_words

METRICS = ("reward/mean", "eval/reward", "age/mean", "time/step_seconds")
SUPERVISED_METRICS = ("train/loss", "time/step_seconds")
CURVE_WIDTH = 40  # characters of the longest curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One of the runs that are compared, as its files have it."""

    name: str
    flags: Mapping[str, object]  # without dashes → value as TOML has it
    rows: Sequence[JsonObject]  # of metrics.jsonl


def compare(words: Sequence[str]) -> str:
    """Return the output of ``miles-async compare``.

    Raises ConfigurationError: a directory is absent, no run's, or without a trained step; no run has a metric.
    """
    parser = CommandParser(
        prog="miles-async compare",
        description="Show the flags in which runs differ, and their curves, each metric on one scale.",
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="RUN_DIR", help="two run directories or more")
    parser.add_argument(
        "--metric", nargs="+", metavar="NAME", help=f"metrics of {FILE_NAME} to show (default: {', '.join(METRICS)})"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="draw the curves into this PNG file")
    parsed = parser.parse_args(words)
    directories: list[Path] = parsed.directories
    if len(directories) < 2:
        parser.error("expected two run directories or more, found one")
    if parsed.output is not None and parsed.output.suffix != ".png":
        parser.error(f"--output {parsed.output}: expected a name that ends with .png")
    by_name = len({directory.resolve().name for directory in directories}) == len(directories)
    runs = [_read(each, each.resolve().name if by_name else str(each)) for each in directories]
    metrics = _metrics(runs, parsed.metric)
    shown = printed(_flag_table(runs), "", _curve_table(runs, metrics), "")
    text = "".join(f"{line.rstrip()}\n" for line in shown.splitlines())
    if parsed.output is not None:
        try:
            plot_curves({run.name: run.rows for run in runs}, metrics, parsed.output)
        except OSError as error:
            raise ConfigurationError(f"--output {parsed.output}: {error}") from error
        text += f"wrote {parsed.output}\n"
    return text


def _read(directory: Path, name: str) -> Run:
    check_directory(directory)
    read_run_process(directory)  # says so if it is not a run directory
    try:
        tables = tomllib.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{directory}: cannot read {CONFIG_FILE}: {error}") from error
    rows = read_rows(directory)
    if not any("time/step_seconds" in row for row in rows):
        raise ConfigurationError(f"{directory}: this run has trained no step yet")
    flags = {flag: value for table in tables.values() for flag, value in table.items() if flag != PLACE}
    return Run(name=name, flags=flags, rows=rows)


def _metrics(runs: Sequence[Run], asked: Sequence[str] | None) -> list[str]:
    measured = {name for run in runs for row in run.rows for name, value in row.items() if value is not None}
    there = sorted(measured - {"step", "time"})
    for name in asked or ():
        if name not in there:
            raise ConfigurationError(f"--metric {name}: no run has it{did_you_mean(name, there)}")
    usual = METRICS if "reward/mean" in there else SUPERVISED_METRICS
    return list(asked or (name for name in usual if name in there))


def _flag_table(runs: Sequence[Run]) -> Table | str:
    names = dict.fromkeys(flag for run in runs for flag in run.flags)
    differing = [flag for flag in names if any(run.flags.get(flag) != runs[0].flags.get(flag) for run in runs)]
    if not differing:
        return "no flag differs"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("flag", no_wrap=True)
    for run in runs:
        table.add_column(Text(run.name), overflow="fold")
    for flag in differing:
        table.add_row(f"--{flag}", *(Text(_value(run.flags.get(flag))) for run in runs))
    return table


def _value(value: object) -> str:
    return MISSING if value is None else as_words(value)  # None: a flag passed on, in another run


def _curve_table(runs: Sequence[Run], metrics: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in ("metric", "run", "curve"):
        table.add_column(name, no_wrap=name == "curve", overflow="fold")
    for name in ("first", "last", f"mean of last {AVERAGE_WINDOW}"):
        table.add_column(name, justify="right")
    longest = max(run.rows[-1]["step"] for run in runs)
    for metric in metrics:
        curves = {run.name: series(run.rows, metric) for run in runs}
        values = [value for _, of_run in curves.values() for value in of_run]
        for number, (name, (steps, of_run)) in enumerate(curves.items()):
            width = round(CURVE_WIDTH * steps[-1] / longest) if steps else 0
            curve = sparkline(_resampled(of_run, max(1, width)), min(values), max(values))
            numbers = [of_run[0], of_run[-1]] if of_run else []
            if numbers and is_of_steps(metric):
                numbers.append(float(moving_average(of_run)[-1]))
            table.add_row(metric if number == 0 else "", Text(name), curve, *(f"{value:.4g}" for value in numbers))
        table.add_section()
    return table


def _resampled(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` means of neighbours."""
    count = min(width, len(values))
    bounds = [len(values) * number // count for number in range(count + 1)] if count else []
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]
