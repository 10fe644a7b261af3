"""Words of a command line, told apart."""

from __future__ import annotations

import re

NEGATIVE_NUMBER = re.compile(r"-[\d.]")
"""Beginning of what is a value although it begins with a dash; argparse's own pattern lacks ``-1e-4``."""


def looks_like_flag(word: str) -> bool:
    """``--x`` and ``-x`` are flags, ``-1``, ``-.5`` and ``-1e-4`` are values."""
    return word.startswith("-") and len(word) > 1 and not NEGATIVE_NUMBER.match(word)
