"""Classify the words of a command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

_CLOSE = 0.7  # similarity of a misspelt choice; "gpu" and "cpu" have 0.67

NEGATIVE_NUMBER = re.compile(r"-([\d.]|(inf|infinity|nan)$)", re.IGNORECASE)
"""Beginning of a value that starts with a dash; argparse's own pattern lacks ``-1e-4``, ``-inf`` and the range
``-1:0.5``.
"""


def looks_like_flag(word: str) -> bool:
    """``--x`` and ``-x`` are flags, ``-1``, ``-.5`` and ``-1e-4`` are values."""
    return word.startswith("-") and len(word) > 1 and not NEGATIVE_NUMBER.match(word)


def did_you_mean(found: object, names: Collection[str], *, close: float = _CLOSE) -> str:
    """End of a message about ``found``, which is none of ``names``: the nearest of them, if one is near.

    >>> did_you_mean("GRPO", ["grpo", "rloo"])
    '; did you mean grpo?'
    """
    folded = {name.lower().replace("-", "_"): name for name in names}
    nearest = difflib.get_close_matches(str(found).lower().replace("-", "_"), folded, n=1, cutoff=close)
    return f"; did you mean {folded[nearest[0]]}?" if nearest else ""
