"""Paths as flags give them are relative to the working directory; workers on other nodes have another one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from arguments import Arguments


def with_absolute_paths(arguments: Arguments) -> Arguments:
    """The same arguments, every path absolute."""
    groups = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    return dataclasses.replace(arguments, **{name: _absolute(group) for name, group in groups.items()})


def _absolute(group: Any) -> Any:
    values = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    paths = {name: value.absolute() for name, value in values.items() if isinstance(value, Path)}
    return dataclasses.replace(group, **paths)
