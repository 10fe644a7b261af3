"""Flags of runs, and where they differ from another run's or from a preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_async.arguments.argument_files import expand_argument_files, presets
from miles_async.arguments.specification import flag_specifications
from miles_async.types import JsonObject
from miles_async.watch.run import Run

PLACE = "run-dir"  # the flag that always differs


def flags(runs: Sequence[Run], preset: str | None = None) -> JsonObject:
    """All flags of the first run's version and the others'.

    {"columns": [title], "flags": [{"flag", "group", "help", "default", "values": [one per column], "differs"}],
    "presets": [name]}. A value is None where a column has no such flag.
    """
    help_of = {item.name.replace("_", "-"): item for item in flag_specifications().values()}
    columns: list[tuple[str, Mapping[str, str]]] = [(run.name, flat(run)) for run in runs]
    if with_preset := preset in presets():
        columns.append((f"preset:{preset}", of_preset(str(preset))))
    groups = {flag: group for run in reversed(runs) for group, table in run.flags().items() for flag in table}
    rows = []
    for flag, group in groups.items():
        values = [column.get(flag) for _, column in columns]
        known = help_of.get(flag)
        default = None if known is None else as_words(known.default)
        rows.append(
            {
                "flag": f"--{flag}",
                "group": group,
                "help": "" if known is None else known.help,
                "default": default,
                "values": values,
                "differs": flag != PLACE and differs(values, with_preset),
            }
        )
    return {"columns": [title for title, _ in columns], "flags": rows, "presets": [*presets()]}


def differs(values: Sequence[str | None], with_preset: bool) -> bool:
    """True if a flag's columns are not equal. A preset sets few flags: what it leaves out does not differ."""
    shown = values[:-1] if with_preset and values[-1] is None else values
    return any(value != shown[0] for value in shown)


def flat(run: Run) -> dict[str, str]:
    """Flag without dashes → value as it is typed."""
    return {flag: as_words(value) for table in run.flags().values() for flag, value in table.items()}


def of_preset(name: str) -> dict[str, str]:
    """Flags that a preset sets, as :func:`flat` has them."""
    found: dict[str, list[str]] = {}
    flag = ""
    for word in expand_argument_files([f"@preset:{name}"]):
        if word.startswith("--"):
            flag, equals, value = word.removeprefix("--").partition("=")
            found[flag] = [value] if equals else []
        elif flag:
            found[flag].append(word)
    switched_off = {flag.removeprefix("no-"): "false" for flag, values in found.items() if flag.startswith("no-")}
    return {flag: " ".join(values) or "true" for flag, values in found.items()} | switched_off


def as_words(value: object) -> str:
    """A TOML value as it is typed on the command line, but for its quotes."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return " ".join(map(str, value))
    return str(value)
