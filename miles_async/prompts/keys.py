"""Columns by name, and fields inside of them by a dotted path: ``reward_model.ground_truth``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from miles_async.errors import DataError
from miles_async.types import JsonObject

if TYPE_CHECKING:
    import pyarrow

USUAL_KEYS = {"--metadata-key": "metadata", "--tool-key": "tools"}
"""Flag → the column's usual name. Rows may lack a column of that name; any other that a flag names has to be there."""


def may_lack(flag: str, key: str) -> bool:
    """Return whether rows may lack this column."""
    return USUAL_KEYS.get(flag) == key


def holder(row: Any, key: str) -> tuple[dict[str, Any], str]:
    """Object that holds ``key``, and its name there. Raises KeyError with what there is instead.

    >>> holder({"reward_model": {"ground_truth": "4"}}, "reward_model.ground_truth")
    ({'ground_truth': '4'}, 'ground_truth')
    """
    if key in row:
        return row, key
    name, dot, rest = key.partition(".")
    inner = row.get(name) if dot else None
    if not isinstance(inner, Mapping):
        raise KeyError(", ".join(sorted(row)) or "none")
    try:
        return holder(inner, rest)
    except KeyError as error:
        raise KeyError(", ".join(f"{name}.{there}" for there in error.args[0].split(", "))) from None


def lacking(rows: Iterable[JsonObject], key: str) -> int:
    """Number of rows without ``key``."""
    number = 0
    for row in rows:
        try:
            holder(row, key)
        except KeyError:
            number += 1
    return number


def root(schema: pyarrow.Schema, key: str, where: str) -> str:
    """Column of ``key``, or of the object that it leads into. Raises DataError beginning with ``where``."""
    from pyarrow import types

    rest, fields, inside = key, {field.name: field.type for field in schema}, ""
    while rest not in fields:
        name, dot, rest = rest.partition(".")
        if not dot or name not in fields or not types.is_struct(fields[name]):
            raise DataError(f"{where}; columns: {', '.join(inside + field for field in fields) or 'none'}")
        fields, inside = {field.name: field.type for field in fields[name]}, f"{inside}{name}."
    return key if not inside else key.partition(".")[0]
