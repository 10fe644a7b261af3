"""Explain unknown flags: a misspelling, or a flag of another system that is in no table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    nearest = _most_similar(words, [*valid, *FOREIGN_FLAGS], _is_close)
    if not nearest and is_for_router:
        return f"unknown flag {name}; arguments of the router are passed as --router-{name[16:]}"
    if nearest and (row := FOREIGN_FLAGS.get(nearest[0])):
        return f"unknown flag {name}; did you mean {nearest[0]}? {_describe_foreign(row)}"
    meant = [*nearest[:1], *_most_similar(words, valid, _are_among)] or _most_similar(words, valid, _hold_all)
    meant = list(dict.fromkeys(meant))[:_SUGGESTIONS]
    if not meant:
        return f"unknown flag {name}; `miles-async train --help-all` lists the flags"
    return f"unknown flag {name}; did you mean {' or '.join(meant)}?"


def _describe_foreign(row: ForeignFlag) -> str:
    found = "it does not exist here either" if row.verdict == "refused" else f"a flag of {row.origin}"
    return f"{found}: {row.note}"


def _words(name: str) -> list[str]:
    return name.lstrip("-").replace("_", "-").lower().split("-")


def _most_similar(words: Sequence[str], flags: Iterable[str], fits: Callable[..., bool]) -> list[str]:
    """Flags that fit ``words``, most similar first."""
    found = [flag for flag in flags if fits(words, _words(flag))]
    return sorted(found, key=lambda flag: -_similarity(words, _words(flag)))


def _is_close(words: Sequence[str], others: Sequence[str]) -> bool:
    return _similarity(words, others) >= _CLOSE_NAME


def _are_among(words: Sequence[str], others: Sequence[str]) -> bool:
    """True if each word is one of the others, or a misspelling of it."""
    return all(get_close_matches(word, others, n=1, cutoff=_CLOSE_WORD) for word in words)


def _hold_all(words: Sequence[str], others: Sequence[str]) -> bool:
    return _are_among(others, words)


def _similarity(words: Sequence[str], others: Sequence[str]) -> float:
    return SequenceMatcher(None, "-".join(words), "-".join(others)).ratio()
