"""Bounds on JSON Schemas of agents, from which engines make grammars.

A grammar's size, and the time of each token under it, can grow with the product of nested repeats: after 100 letters of
``(a{1,1000}){1,1000}`` XGrammar (0.2.7) takes most of a second per token, more with each, in the engine's scheduler.
200 nested objects take 7 s to read. Within these bounds a token took 0.06 s of CPU on average at worst, with 151,000
texts in the vocabulary. A grammar is compiled in a thread of the engine, which gives up on it after 50 s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from miles_async.errors import TrajectoryError

MOST_CHARACTERS = 65_536  # of all schemas of a request
MOST_LEVELS = 64  # of nested JSON values
MOST_REPEATS = 10_000  # of minItems and the like
LONGEST_PATTERN = 4_096  # characters
MOST_COPIES = 1_024  # of a pattern's characters, once its repeats are written out
MOST_TEXT_LIMITS = 32  # different lengths and patterns of texts: each takes up to 7 s to compile

_COUNTS = [side + what for side in ("min", "max") for what in ("Items", "Length", "Properties", "Contains")]
_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}|.", re.DOTALL)


def check_bounds(schemas: Sequence[object]) -> None:
    """Check the schemas of one request. Raises TrajectoryError naming the bound that one exceeds."""
    pending = [(schema, 1) for schema in schemas]
    characters, text_limits = 0, set[object]()
    while pending:
        value, level = pending.pop()
        if level > MOST_LEVELS:
            raise TrajectoryError(f"a JSON Schema is nested more than {MOST_LEVELS} levels deep")
        characters += len(value) if isinstance(value, str) else 4
        if isinstance(value, Mapping):
            characters += sum(map(len, value))
            text_limits |= _text_limits(value)
            pending += [(inner, level + 1) for inner in value.values()]
        elif isinstance(value, list):
            pending += [(inner, level + 1) for inner in value]
        if characters > MOST_CHARACTERS:
            raise TrajectoryError(f"the JSON Schemas of a request have more than {MOST_CHARACTERS:,} characters")
        if len(text_limits) > MOST_TEXT_LIMITS:
            raise TrajectoryError(
                f"the JSON Schemas of a request have more than {MOST_TEXT_LIMITS} different patterns and text lengths"
            )


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
        elif piece[0] == "(":
            groups.append(0)
            last = 0
        elif piece[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif piece[0] not in "*+?|^$":
            groups[-1] += 1
            last = 1
    return sum(groups)


def _text_limits(schema: Mapping[str, object]) -> set[object]:
    """Check the repeats and patterns of one schema; return its pattern and lengths of texts."""
    for name in _COUNTS:
        count = schema.get(name)
        if isinstance(count, (int, float)) and count > MOST_REPEATS:
            raise TrajectoryError(f"{name} of a JSON Schema is {count}: at most {MOST_REPEATS:,}")
    patterns = [schema.get("pattern"), *_keys(schema.get("patternProperties"))]
    texts = [pattern for pattern in patterns if isinstance(pattern, str)]
    for pattern in texts:
        if len(pattern) > LONGEST_PATTERN or copies(pattern) > MOST_COPIES:
            raise TrajectoryError(
                f"pattern {pattern[:80]!r} of a JSON Schema: at most {LONGEST_PATTERN:,} characters, and "
                f"{MOST_COPIES:,} once its repeats are written out (nested repeats multiply)"
            )
    lengths = tuple(
        length for name in ("minLength", "maxLength") if isinstance(length := schema.get(name), (int, float))
    )
    return {*texts, *([lengths] if lengths else [])}


def _keys(patterns: object) -> list[object]:
    return list(patterns) if isinstance(patterns, Mapping) else []
