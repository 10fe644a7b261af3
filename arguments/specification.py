"""Flags derived from the fields of the argument groups: name, type and parsing of values.

The command line (``parser.py``), configuration files (``config_file.py``) and the checks (``validation.py``)
all work from this one table.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.flag import FlagValue, ModuleAttr
from miles_async.arguments.words import did_you_mean

MODULE_ATTR = r"[\w.]+:\w+"
"""Pattern of a ModuleAttr."""

LARGEST_WHOLE = 2**63 - 1
"""Largest whole number: files and libraries hold 64 bits with a sign."""

Kind = type[bool | int | float | str | Path]

KIND_NAMES: Mapping[Kind, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    bool: "true or false",
}

BOUNDS: Mapping[str, Callable[[float, float], bool]] = {
    "at least": operator.ge,
    "more than": operator.gt,
    "at most": operator.le,
    "less than": operator.lt,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlagSpecification:
    """One flag. ``kind`` is the type of a single value; ``many`` flags hold a tuple of them."""

    group: str  # field of Arguments: "staleness"
    name: str  # field of that group: "max_weight_staleness"
    kind: Kind
    optional: bool  # the word "none" means None
    many: bool
    default: FlagValue
    help: str
    choices: tuple[str, ...]  # of a Literal; else ()
    or_path: bool  # takes module:attr besides its choices
    metavar: str | None
    needs: tuple[str, ...]  # see flag()
    replaced_by: tuple[str, ...]
    bounds: Mapping[str, float | None]  # words of BOUNDS → number; None: there is no such bound

    def value_in(self, arguments: Arguments) -> FlagValue:
        value: FlagValue = getattr(getattr(arguments, self.group), self.name)
        return value

    @property
    def flag(self) -> str:
        """``--max-weight-staleness``."""
        return "--" + self.name.replace("_", "-")

    @property
    def negated_flag(self) -> str:
        """``--no-progress``, for booleans."""
        return "--no-" + self.name.replace("_", "-")

    def is_choice(self, value: FlagValue) -> bool:
        """True if the flag's choices allow ``value``."""
        own = self.or_path and isinstance(value, str) and re.fullmatch(MODULE_ATTR, value)
        return value in self.choices or bool(own)

    @property
    def accepted(self) -> tuple[str, ...]:
        """Choices as shown to the user."""
        return (*self.choices, "module:attr") if self.or_path else self.choices

    def from_text(self, text: str) -> FlagValue:
        """One value as typed on a command line. Raises ValueError saying what was expected."""
        if self.optional and text.lower() == "none":
            return None
        try:
            value = self.kind(text) if self.kind in (int, float) else text
        except ValueError:
            raise ValueError(self._expected(text)) from None
        return self._checked(value, text)

    def from_toml(self, value: object) -> FlagValue:
        """The value of a key in a configuration file. Raises ValueError saying what was expected."""
        if self.optional and isinstance(value, str) and value.lower() == "none":
            return None
        if self.many:
            values = [value] if isinstance(value, str) else value
            if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
                raise ValueError(f"expected a list of texts, found {value!r}")
            return tuple(values)
        if isinstance(value, bool) is not (self.kind is bool):
            raise ValueError(self._expected(value))
        if self.kind is float and isinstance(value, int | float):
            return self._checked(float(value), value)
        expected = str if self.kind is Path else self.kind
        if not isinstance(value, expected) or not isinstance(value, bool | int | str):
            raise ValueError(self._expected(value))
        return self._checked(value, value)

    def expected_instead(self, value: FlagValue) -> str | None:
        """Describe what the flag's choices and bounds expect instead of ``value``; None if they allow it."""
        if self.choices and not self.is_choice(value):
            return f"one of {', '.join(self.accepted)}"
        bounds = {words: bound for words, bound in self.bounds.items() if bound is not None}
        if not isinstance(value, int | float) or all(BOUNDS[words](value, bound) for words, bound in bounds.items()):
            return None
        none = ", or none" if self.optional else ""
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items()) + none

    def _checked(self, value: bool | int | float | str, found: object) -> FlagValue:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(self._expected(found))
        if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
            raise ValueError(f"expected a whole number of at most {LARGEST_WHOLE}, found {found!s:.40}")
        if self.kind is Path and isinstance(value, str):
            if not value:
                raise ValueError("expected a path, found an empty text")
            if value.startswith("$"):
                raise ValueError(f"expected a path, found {value!r}: variables are not expanded here, a ~ is")
            try:
                return Path(value).expanduser()
            except RuntimeError:
                raise ValueError(f"expected a path, found {value!r}: there is no such user") from None
        if self.choices and not self.is_choice(value):
            names = (*self.accepted, "none") if self.optional else self.accepted
            hint = did_you_mean(found, self.choices)
            raise ValueError(f"expected one of {', '.join(names)}; found {found!r}{hint}")
        return value

    def _expected(self, found: object) -> str:
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
            kind, optional, many, choices = _analyse(hints[field.name])
            table[field.name] = FlagSpecification(
                group=group, name=field.name, kind=kind, optional=optional, many=many, choices=choices,
                or_path=ModuleAttr in typing.get_args(hints[field.name]), **field.metadata,
            )  # fmt: skip
    return table


def group_flags(group: str) -> list[FlagSpecification]:
    return [flag for flag in flag_specifications().values() if flag.group == group]


def _analyse(annotation: object) -> tuple[Kind, bool, bool, tuple[str, ...]]:
    """(kind, optional, many, choices) of ``X``, ``tuple[X, ...]``, ``Literal[...]``, or a union of them with None."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        items = [_analyse(item) for item in typing.get_args(annotation) if item is not type(None)]
        kind, _, many, _ = items[0]
        choices = tuple(choice for item in items for choice in item[3])
        return kind, type(None) in typing.get_args(annotation), many, choices
    if annotation is ModuleAttr:
        return str, False, False, ()
    if typing.get_origin(annotation) is typing.Literal:
        return str, False, False, typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], False, True, ()
    kind = next(kind for kind in KIND_NAMES if kind is annotation)
    return kind, False, False, ()
