"""``--config file.toml`` and ``--print-config``: the arguments as TOML, written so that it can be read back.

Keys are flag names (``max-weight-staleness`` or ``max_weight_staleness``), at the top or in a table named
after their group (``[staleness]``). TOML has no null: ``"none"`` means None, as on the command line.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.flag import FlagValue
from miles_async.arguments.pass_through import (
    PREFIXES,
    PassThrough,
    collector,
    is_pass_through,
    unflatten,
    values_from_toml,
)
from miles_async.arguments.problems import refuse
from miles_async.arguments.specification import argument_groups, flag_specifications, group_flags, group_title
from miles_async.arguments.unknown_flags import explain_unknown
from miles_async.errors import ConfigurationError


def read_config_file(path: Path) -> tuple[dict[str, FlagValue], PassThrough]:
    """(field name → value, flags that are passed on). Raises ConfigurationError naming every bad key."""
    if path.suffix == ".args":
        raise ConfigurationError(f"--config reads TOML: give the argument file as @{path}")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigurationError(f"--config: there is no file {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"--config: cannot read {path}: {error}") from None
    values: dict[str, FlagValue] = {}
    passed: PassThrough = {}
    problems: list[str] = []
    for table, key, value in _entries(document):
        try:
            _read_key(table, key, value, values, passed)
        except ValueError as error:
            problems.append(f"{path}: {f'[{table}] ' if table else ''}{key}: {error}")
    refuse(problems)
    return values, passed


def _entries(document: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    """(table or "", key, value) of every key."""
    titles = {group_title(group).lower(): group for group in argument_groups()}  # as --help calls them
    for key, value in document.items():
        group = titles.get(key.lower(), key)
        if isinstance(value, dict) and group in argument_groups():
            yield from ((group, inner, inner_value) for inner, inner_value in value.items())
        else:
            yield "", key, value


def _read_key(table: str, key: str, value: object, values: dict[str, FlagValue], passed: PassThrough) -> None:
    specifications = flag_specifications()
    name, flag = key.replace("-", "_"), "--" + key.replace("_", "-")
    specification = specifications.get(name)
    if specification is None:
        ours = [item.flag for item in specifications.values()]
        if is_pass_through(flag, ours) and table in ("", collector(flag).group):
            passed[flag] = values_from_toml(value)
            return
        if isinstance(value, dict):
            raise ValueError(f"there is no such table; tables are {', '.join(argument_groups())}")
        explained = explain_unknown(flag, ours).replace("flag --", "key ").replace("mean --", "mean ")
        raise ValueError(explained.replace(" or --", " or "))
    if table not in ("", specification.group):
        raise ValueError(f"belongs to [{specification.group}]")
    if name in values:
        raise ValueError("given twice")
    values[name] = specification.from_toml(value)


def to_toml(arguments: Arguments) -> str:
    """Write all arguments, defaults included, as TOML that ``--config`` reads back to an equal object."""
    lines: list[str] = []
    for group in argument_groups():
        lines.append(f"[{group}]")
        values = getattr(arguments, group)
        for specification in group_flags(group):
            key = specification.flag.removeprefix("--")
            lines.append(f"{key} = {_toml_value(specification.value_in(arguments))}")
        extras = {where: getattr(values, where.field) for where in PREFIXES.values() if where.group == group}
        for flag, words in unflatten(extras):
            value = True if not words else words[0] if len(words) == 1 else words
            lines.append(f"{json.dumps(flag.removeprefix('--'))} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: FlagValue) -> str:
    match value:
        case None:
            return '"none"'
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case tuple():
            return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # A JSON string is a TOML basic string but for DEL, which TOML wants escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
