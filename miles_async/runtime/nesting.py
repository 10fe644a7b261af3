"""Values that cannot be saved: msgspec, json and pickle each fail somewhere between 300 and 1000 nested levels, and
msgpack has no integers beyond 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

DEEPEST = 100  # levels of lists and objects in a row of data, or in the metadata of a sample
_SCALARS = frozenset((str, int, float, bool, type(None)))


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
            if type(inner) not in _SCALARS  # a list may hold a number per token
        }
    return True


def too_large(value: object) -> bool:
    """Return whether there is an integer beyond 64 bits in a value that is not :func:`too_deep`.

    >>> too_large({"a": [2**64 - 1, True]}), too_large({"a": [-(2**63) - 1]})
    (False, True)
    """
    match value:
        case int():
            return not _fits(value)
        case Mapping():
            return any(map(too_large, value.values()))
        case list() | tuple():
            return any(map(too_large, value))
    return False


def storable(value: object) -> object:
    """Return plain data with a text in the place of each integer beyond 64 bits: models write them.

    >>> storable({"a": [2**64, 1]})
    {'a': ['18446744073709551616', 1]}
    """
    match value:
        case int() if not _fits(value):
            return str(value)
        case Mapping():
            return {key: storable(each) for key, each in value.items()}
        case list() | tuple():
            return [storable(each) for each in value]
    return value


def _fits(number: int) -> bool:
    return -(2**63) <= number < 2**64
