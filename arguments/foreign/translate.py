"""A command line with flags of other systems → one with ours, and notes and checks about the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from miles_async.arguments.foreign import FOREIGN_FLAGS, FOREIGN_VALUES
from miles_async.arguments.foreign.record import ForeignFlag, Takes
from miles_async.arguments.words import looks_like_flag

Given = tuple[str, ...]
"""Values as they were typed."""


@dataclass(kw_only=True, slots=True)
class Translation:
    """A command line after translation. If a flag is repeated, its last mention counts, as everywhere."""

    words: list[str] = field(default_factory=list)  # for our parser
    notes: dict[str, str] = field(default_factory=dict)  # flag → why it changes nothing, or what is done instead
    checks: dict[str, Given] = field(default_factory=dict)  # flag → values, for foreign/checks.py
    problems: dict[str, str] = field(default_factory=dict)  # flag → why it is refused


VALUED_FLAGS = frozenset(flag for flag, _ in FOREIGN_VALUES)
"""Flags of ours that have values of other systems; each takes one."""


def translate(words: Sequence[str]) -> Translation:
    """Replace the flags of other systems in ``words``."""
    done = Translation()
    found = list(mentions(words))
    last = {flag: place for place, (flag, _) in enumerate(found)}
    for place, (flag, values) in enumerate(found):
        takes = _takes(flag)
        if flag == "--rollout-external" and not values and "--rollout-external-engine-addrs" in last:
            continue  # a switch of miles, whose addresses are the other flag's
        if takes is None:
            done.words += [*([flag] if flag else []), *values]
            continue
        taken = len(values) if takes == "many" else min(len(values), int(takes == "one"))
        if place == last[flag] and flag in FOREIGN_FLAGS:
            _apply(FOREIGN_FLAGS[flag], values[:taken], done)
        elif place == last[flag]:
            done.words += _ours(flag, values[:taken], done)
        done.words += values[taken:]
    return done


def mentions(words: Sequence[str]) -> Iterator[tuple[str, Given]]:
    """(flag, words up to the next flag); ("", words) before the first. ``--x=1`` is split if it is in the table."""
    flag, values = "", list[str]()
    for word in words:
        if not looks_like_flag(word):
            values.append(word)
            continue
        yield flag, tuple(values)
        name, equals, value = word.partition("=")
        flag, values = (name, [value]) if equals and _takes(name) else (word, [])
    yield flag, tuple(values)


def _takes(flag: str) -> Takes | None:
    """Values of a flag in the tables; None if it isn't there."""
    row = FOREIGN_FLAGS.get(flag)
    return row.takes if row is not None else "one" if flag in VALUED_FLAGS else None


def _ours(flag: str, values: Given, done: Translation) -> Given:
    """Our words for a flag of ours and the value of another system."""
    row = FOREIGN_VALUES.get((flag, values[0])) if values else None
    if row is not None and row.ours:
        done.notes[flag] = f"{flag} {row.value} is taken as {' '.join(row.ours)}: {row.note}"
        return row.ours
    if row is not None:
        done.problems[flag] = f"{flag} {row.value} does not exist here: {row.note}"
    return _said((flag,), values)


def _said(flags: Given, values: Given) -> Given:
    """Flags, then values; one that looks like a flag itself is written as ``--x=-v``, as it must have been."""
    if len(values) == 1 and looks_like_flag(values[0]):
        return (*flags[:-1], f"{flags[-1]}={values[0]}")
    return (*flags, *values)


def _apply(row: ForeignFlag, values: Given, done: Translation) -> None:
    shown = " ".join((row.flag, *values))
    if row.takes == "one" and not values:
        done.problems[row.flag] = f"{row.flag}: expected one argument"
    elif row.verdict == "refused":
        done.problems[row.flag] = f"{row.flag} does not exist here: {row.note}"
    elif values and values[0] in row.idle:
        done.notes[row.flag] = f"{shown} changes nothing: {row.idle[values[0]]}"
    elif row.only and not any(same(values[0], accepted) for accepted in row.only):
        done.problems[row.flag] = f"{shown}: expected {' or '.join((*row.only, *row.idle))}: {row.note}"
    elif row.verdict == "checked":
        done.checks[row.flag] = values
    elif row.verdict == "noted":
        done.notes[row.flag] = f"{shown} changes nothing: {row.note}"
    else:
        done.words += _said(row.ours, () if row.only else values)


def same(first: str, second: str) -> bool:
    """True if both are the same number, or the same text.

    >>> same("0.00", "0"), same("1e-5", "0.00001"), same("adam", "sgd")
    (True, True, False)
    """
    try:
        return float(first) == float(second)
    except ValueError:
        return first == second
