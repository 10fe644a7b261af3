"""Read a judge's mark. Strict, since a number that is not the mark would be trained on."""

from __future__ import annotations

import re

_EMPHASIS = str.maketrans("", "", "*_`")  # Markdown's
_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?"
_LABEL = r"(?:.*[^ 0-9] ?[:=])?"  # "Mark:", "Score (0-10) ="; no colon of a time or ratio
_VERDICT = re.compile(rf"{_LABEL} ?({_NUMBER})(?: ?(?:/|out of) ?({_NUMBER}))? ?\.?")


def read_verdict(said: str, low: float, high: float) -> float | None:
    r"""Return the mark in the last line, or None if that line is anything else than a mark of this scale.

    A label before it, ``/HIGH`` or ``out of HIGH`` behind it, a full stop and Markdown's emphasis are allowed.

    >>> read_verdict("Mostly right.\nMark: **7**/10", 0, 10)
    7.0
    """
    lines = said.translate(_EMPHASIS).strip().splitlines()
    found = _VERDICT.fullmatch(" ".join(lines[-1].split())) if lines else None
    if found is None or (found[2] is not None and float(found[2]) != high):
        return None
    mark = float(found[1])
    return mark if low <= mark <= high else None
