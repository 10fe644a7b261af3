"""How deeply JSON is nested: msgspec, json and pickle each fail somewhere between 300 and 1000 levels."""

from __future__ import annotations

from collections.abc import Mapping

DEEPEST = 100  # levels of lists and objects in a row of data, or in the metadata of a sample


def too_deep(value: object, levels: int = DEEPEST) -> bool:
    """Return whether lists and objects are nested in more than ``levels`` levels, or in a circle.

    >>> too_deep([[1], [2]], levels=2), too_deep({"a": [[1], [2]]}, levels=2)
    (False, True)
    """
    level = {id(value): value}
    for _ in range(levels + 1):
        containers = [outer for outer in level.values() if isinstance(outer, Mapping | list | tuple)]
        if not containers:
            return False
        level = {
            id(inner): inner
            for outer in containers
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        }
    return True
