"""What every field of the argument groups is as a flag: its name, type and how its value is read.

The command line (``parser.py``), configuration files (``config_file.py``) and the checks (``validation.py``)
all work from this one table.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles_async.arguments import Arguments

KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", Path: "a path", bool: "true or false"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlagSpecification:
    """One flag. ``kind`` is the type of a single value; ``many`` flags hold a tuple of them."""

    group: str  # field of Arguments: "staleness"
    name: str  # field of that group: "max_weight_staleness"
    kind: type  # bool, int, float, str or Path
    optional: bool  # the word "none" means None
    many: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    metavar: str | None

    @property
    def flag(self) -> str:
        """``--max-weight-staleness``."""
        return "--" + self.name.replace("_", "-")

    @property
    def negated_flag(self) -> str:
        """``--no-progress``, for booleans."""
        return "--no-" + self.name.replace("_", "-")

    def from_text(self, text: str) -> Any:
        """One value as typed on a command line. Raises ValueError saying what was expected."""
        if self.optional and text.lower() == "none":
            return None
        value: Any = text
        if self.kind in (int, float):
            try:
                value = self.kind(text)
            except ValueError:
                raise ValueError(self._expected(text)) from None
        return self._checked(value, text)

    def from_toml(self, value: Any) -> Any:
        """The value of a key in a configuration file. Raises ValueError saying what was expected."""
        if self.optional and isinstance(value, str) and value.lower() == "none":
            return None
        if self.many:
            value = [value] if isinstance(value, str) else value
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise ValueError(f"expected a list of texts, found {value!r}")
            return tuple(value)
        accepted = {int: (int,), float: (int, float), str: (str,), Path: (str,), bool: (bool,)}[self.kind]
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.kind is not bool):
            raise ValueError(self._expected(value))
        return self._checked(float(value) if self.kind is float else value, value)

    def _checked(self, value: Any, found: Any) -> Any:
        if self.kind is float and not math.isfinite(value):
            raise ValueError(self._expected(found))
        if self.kind is Path:
            if not value:
                raise ValueError("expected a path, found an empty text")
            return Path(value).expanduser()
        if self.choices and value not in self.choices:
            names = (*self.choices, "none") if self.optional else self.choices
            raise ValueError(f"expected one of {', '.join(names)}; found {found!r}")
        return value

    def _expected(self, found: Any) -> str:
        none = ' or "none"' if self.optional else ""
        return f"expected {KIND_NAMES[self.kind]}{none}, found {found!r}"


@lru_cache(maxsize=1)
def argument_groups() -> Mapping[str, type]:
    """Group name → its dataclass, in the order of ``--help``."""
    hints = typing.get_type_hints(Arguments)
    return {field.name: hints[field.name] for field in dataclasses.fields(Arguments)}


def group_title(group: str) -> str:
    """Title of a group in ``--help``: the docstring of its dataclass."""
    return inspect.cleandoc(argument_groups()[group].__doc__ or group)


def group_description(group: str) -> str:
    """Description of a group in ``--help``: the first paragraph of its module's docstring."""
    documentation = inspect.cleandoc(sys.modules[argument_groups()[group].__module__].__doc__ or "")
    return documentation.split("\n\n")[0].replace("``", "`")


@lru_cache(maxsize=1)
def flag_specifications() -> Mapping[str, FlagSpecification]:
    """Field name → its flag, for every field of every group that is declared with ``flag()``."""
    table: dict[str, FlagSpecification] = {}
    for group, dataclass in argument_groups().items():
        hints = typing.get_type_hints(dataclass)
        for field in dataclasses.fields(dataclass):
            if "help" not in field.metadata:  # collected by the parser, not typed by name: sglang_extra, router_extra
                continue
            assert field.name not in table, f"{field.name} is declared in {table[field.name].group} and {group}"
            kind, optional, many = _analyse(hints[field.name])
            table[field.name] = FlagSpecification(
                group=group, name=field.name, kind=kind, optional=optional, many=many,
                default=field.default, **field.metadata,
            )  # fmt: skip
    return table


def _analyse(annotation: Any) -> tuple[type, bool, bool]:
    """(kind, optional, many) of ``X``, ``tuple[X, ...]``, or one of them ``| None``."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (item,) = (item for item in typing.get_args(annotation) if item is not type(None))
        kind, _, many = _analyse(item)
        return kind, True, many
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], False, True
    return annotation, False, False
