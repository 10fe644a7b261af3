"""Words of a command line, told apart."""

from __future__ import annotations


def looks_like_flag(word: str) -> bool:
    """``--x`` and ``-x`` are flags, ``-1`` and ``-.5`` are values."""
    return word.startswith("-") and len(word) > 1 and not (word[1].isdigit() or word[1] == ".")
