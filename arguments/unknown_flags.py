"""Explain unknown flags: a misspelling, or a flag of another system that is in no table."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches

from miles_async.arguments.foreign import FOREIGN_FLAGS
from miles_async.arguments.foreign.record import ForeignFlag

_CLOSE_NAME = 0.8  # similarity of a misspelt name; unrelated flags of equal length have 0.4 to 0.7
_CLOSE_WORD = 0.85
_SUGGESTIONS = 3


def explain_unknown(name: str, valid: Sequence[str]) -> str:
    """Explain that a flag (or key of a file) does not exist, and suggest flags of similar spelling or with its words.

    >>> explain_unknown("--max-weight-stalenes", ["--max-weight-staleness", "--lr"])
    'unknown flag --max-weight-stalenes; did you mean --max-weight-staleness?'
    """
    if row := FOREIGN_FLAGS.get(name):
        return f"{name} does not exist here: {row.note}"
    is_for_router = name.startswith("--sglang-router-")
    words = _words(name)
    known = {flag: _words(flag) for flag in (*valid, *FOREIGN_FLAGS)}
    similarity = {
        flag: SequenceMatcher(None, "-".join(words), "-".join(others)).ratio() for flag, others in known.items()
    }
    ranked = sorted(known, key=similarity.__getitem__, reverse=True)
    nearest = [flag for flag in ranked[:1] if similarity[flag] >= _CLOSE_NAME]
    if not nearest and is_for_router:
        return f"unknown flag {name}; arguments of the router are passed as --router-{name[16:]}"
    if nearest and (row := FOREIGN_FLAGS.get(nearest[0])):
        return f"unknown flag {name}; did you mean {nearest[0]}? {_describe_foreign(row)}"
    ours = [flag for flag in ranked if flag in valid]
    meant = nearest + [flag for flag in ours if _are_among(words, known[flag])]
    meant = meant or [flag for flag in ours if _are_among(known[flag], words)]
    meant = list(dict.fromkeys(meant))[:_SUGGESTIONS]
    if not meant:
        return f"unknown flag {name}; `miles-async train --help-all` lists the flags"
    return f"unknown flag {name}; did you mean {' or '.join(meant)}?"


def _describe_foreign(row: ForeignFlag) -> str:
    found = "it does not exist here either" if row.verdict == "refused" else f"a flag of {row.origin}"
    return f"{found}: {row.note}"


def _words(name: str) -> list[str]:
    return name.lstrip("-").replace("_", "-").lower().split("-")


def _are_among(words: Sequence[str], others: Sequence[str]) -> bool:
    """True if each word is one of the others, or a misspelling of it."""
    return all(get_close_matches(word, others, n=1, cutoff=_CLOSE_WORD) for word in words)
