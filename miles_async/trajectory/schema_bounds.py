"""Bounds on JSON Schemas of agents, from which engines make grammars.

A grammar's size, and the time of each token under it, can grow with the product of nested repeats: after 100 letters of
``(a{1,1000}){1,1000}`` XGrammar (0.2.7) takes most of a second per token, more with each, in the engine's scheduler.
200 nested objects take 7 s to read. Short patterns can be as bad if the counts of their repeats may be chosen in many
ways, since all that match are followed: ``([a-z]{1,10} ?){1,10}`` was not compiled after 25 s. Within these bounds a
token took 0.06 s of CPU on average at worst, with 151,000 texts in the vocabulary. A grammar is compiled in a thread of
the engine, which gives up on it after 50 s. Seconds here are CPU seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles_async.errors import TrajectoryError

MOST_CHARACTERS = 65_536  # of all schemas of a request
MOST_LEVELS = 64  # of nested JSON values
MOST_REPEATS = 10_000  # of minItems and the like
LONGEST_PATTERN = 4_096  # characters
MOST_COPIES = 1_024  # of a pattern's characters, once its repeats are written out
MOST_WAYS = 1_000  # to choose the counts of repeats, over all patterns: at most 3 s to compile, 0.04 s per token
MOST_PATTERNS = 32  # different ones
MOST_UNBOUNDED = 64  # repeats without an upper count, over all patterns: 200 may take 30 s to compile, 64 take 4 s
MOST_LENGTHS = 1_024  # sum of different lengths of texts, each up to SAME_LENGTH, which takes 13 s to compile
SAME_LENGTH = 256  # characters from which on a length costs the same
MOST_PROPERTIES = 256  # of one object: any optional one may come next
MOST_COUNTED_PROPERTIES = 32  # of one whose properties are counted: their number and which come next multiply

Lengths = tuple[int, int]

_COUNTS = [side + what for side in ("min", "max") for what in ("Items", "Length", "Properties", "Contains")]
_PIECE = re.compile(
    r"\\.|\[(?:\\.|[^\]\\])*\]|\((?:\?(?:[:=!]|<[=!]|P?<\w+>))?|\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}|.", re.DOTALL
)


def check_bounds(schemas: Sequence[object]) -> None:
    """Check the schemas of one request. Raises TrajectoryError naming the bound that one exceeds."""
    pending = [(schema, 1) for schema in schemas]
    characters, patterns, lengths = 0, set[str](), set[Lengths]()
    while pending:
        value, level = pending.pop()
        if level > MOST_LEVELS:
            raise TrajectoryError(f"a JSON Schema is nested more than {MOST_LEVELS} levels deep")
        characters += len(value) if isinstance(value, str) else 4
        if isinstance(value, Mapping):
            characters += sum(map(len, value))
            _check_counts(value)
            patterns |= _patterns(value)
            lengths.add(_lengths(value))
            pending += [(inner, level + 1) for inner in value.values()]
        elif isinstance(value, list):
            pending += [(inner, level + 1) for inner in value]
        if characters > MOST_CHARACTERS:
            raise TrajectoryError(f"the JSON Schemas of a request have more than {MOST_CHARACTERS:,} characters")
        if len(patterns) > MOST_PATTERNS:
            raise TrajectoryError(f"the JSON Schemas of a request have more than {MOST_PATTERNS} different patterns")
        if sum(min(length, SAME_LENGTH) for pair in lengths for length in pair) > MOST_LENGTHS:
            raise TrajectoryError(
                f"the different minLength and maxLength of a request's JSON Schemas, each up to {SAME_LENGTH}, add up "
                f"to more than {MOST_LENGTHS:,}"
            )
    if sum(map(ways, patterns)) > MOST_WAYS:
        raise TrajectoryError(
            f"the patterns of a request's JSON Schemas have more than {MOST_WAYS:,} ways to choose the counts of their "
            "repeats, which multiply: use repeats without an upper count, such as [a-z]+"
        )
    if sum(map(unbounded, patterns)) > MOST_UNBOUNDED:
        raise TrajectoryError(
            f"the patterns of a request's JSON Schemas have more than {MOST_UNBOUNDED} repeats without an upper count, "
            "such as [a-z]+"
        )


def unbounded(pattern: str) -> int:
    """Repeats of a regular expression that have no upper count.

    >>> unbounded("^[a-z]+(-[a-z]{2,})*$")
    3
    """
    return sum(piece[0] in ("*", "+") or (bool(piece[1]) and piece[2] == "") for piece in _PIECE.finditer(pattern))


def copies(pattern: str) -> int:
    """Characters and classes of a regular expression once its counted repeats are written out.

    >>> copies("^(ab{1,3}){10}$")
    40
    """
    groups, last = [0], 0  # sizes of open groups so far, and of what a repeat would repeat
    for piece in _PIECE.finditer(pattern):
        if piece[1]:
            times = max(int(piece[1]), int(piece[2] or 0), 1)
            groups[-1] += last * (times - 1)
            last *= times
        elif piece[0].startswith("("):
            groups.append(0)
            last = 0
        elif piece[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif piece[0] not in "*+?|^$":
            groups[-1] += 1
            last = 1
    return sum(groups)


def ways(pattern: str) -> int:
    """Ways to choose the counts of the repeats of a regular expression; beyond ``MOST_WAYS``, any larger number.

    >>> ways("([0-9]{1,3}[.]){3}[0-9]{1,3}"), ways("[a-z]+")
    (81, 1)
    """
    groups = [_Ways()]
    for piece in _PIECE.finditer(pattern):
        if piece[1]:
            least = int(piece[1])
            open_end = piece[2] == ""
            groups[-1].repeat(least, None if open_end else int(piece[2] or least))
        elif piece[0] in ("*", "+", "?"):
            groups[-1].repeat(0, 1 if piece[0] == "?" else None)
        elif piece[0].startswith("("):
            groups.append(_Ways())
        elif piece[0] == ")" and len(groups) > 1:
            of_group = groups.pop().total
            groups[-1].add(of_group)
        elif piece[0] == "|":
            groups[-1].begin_alternative()
        else:
            groups[-1].add(1)
    return math.prod(group.total for group in groups)


@dataclass(slots=True)
class _Ways:
    """Counts in an open group of a pattern, each at most one more than its bound."""

    best: int = 0  # of its alternatives before this one
    before: int = 1  # of this alternative, before its last element
    last: int = 1  # of that element

    @property
    def total(self) -> int:
        return max(self.best, min(self.before * self.last, MOST_WAYS + 1))

    def add(self, element: int) -> None:
        self.before, self.last = min(self.before * self.last, MOST_WAYS + 1), element

    def begin_alternative(self) -> None:
        self.best, self.before, self.last = self.total, 1, 1

    def repeat(self, least: int, most: int | None) -> None:
        """``most``: None if there is no upper count; a repeat may then begin wherever the last one ends."""
        counts = [max(least, 3)] if most is None else range(least, min(most, least + MOST_WAYS) + 1)
        found = sum(self.last ** min(count, MOST_WAYS.bit_length()) for count in counts)
        self.last = min(max(found, 1), MOST_WAYS + 1)


def _check_counts(schema: Mapping[str, object]) -> None:
    for name in _COUNTS:
        count = schema.get(name)
        if isinstance(count, (int, float)) and count > MOST_REPEATS:
            raise TrajectoryError(f"{name} of a JSON Schema is {count}: at most {MOST_REPEATS:,}")
    properties = len(_keys(schema.get("properties")))
    if properties > MOST_PROPERTIES:
        raise TrajectoryError(f"an object of a JSON Schema has more than {MOST_PROPERTIES} properties")
    if properties > MOST_COUNTED_PROPERTIES and {"minProperties", "maxProperties"} & schema.keys():
        raise TrajectoryError(
            f"an object of a JSON Schema has minProperties or maxProperties and more than {MOST_COUNTED_PROPERTIES} "
            "properties"
        )


def _patterns(schema: Mapping[str, object]) -> set[str]:
    """The patterns of one schema, each checked by itself."""
    patterns = [schema.get("pattern"), *_keys(schema.get("patternProperties"))]
    texts = {pattern for pattern in patterns if isinstance(pattern, str)}
    for pattern in texts:
        if len(pattern) > LONGEST_PATTERN or copies(pattern) > MOST_COPIES:
            raise TrajectoryError(
                f"pattern {pattern[:80]!r} of a JSON Schema: at most {LONGEST_PATTERN:,} characters, and "
                f"{MOST_COPIES:,} once its repeats are written out (nested repeats multiply)"
            )
    return texts


def _lengths(schema: Mapping[str, object]) -> Lengths:
    """(minLength, maxLength), 0 where there is none: each pair costs, also if another one has one of the two."""
    least, most = (
        int(length) if isinstance(length, int | float) and 0 < length <= MOST_REPEATS else 0
        for length in (schema.get("minLength"), schema.get("maxLength"))
    )
    return least, most


def _keys(mapping: object) -> list[object]:
    return list(mapping) if isinstance(mapping, Mapping) else []
