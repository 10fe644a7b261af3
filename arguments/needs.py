"""Check that every flag that is given has an effect: what it needs, as its declaration says, is given too (C12)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from miles_async.arguments import Arguments
from miles_async.arguments.flag import FlagValue
from miles_async.arguments.specification import MODULE_ATTR, FlagSpecification, flag_specifications

HARMLESS_GROUPS = ("observability",)
"""Groups whose flags change nothing about what is learned: one without effect is a note."""


def check_needs(arguments: Arguments, problems: Sequence[str]) -> Iterator[str]:
    """Check that no flag differs from its default while nothing that it needs is given.

    ``problems`` found already: a flag that they name is left to them, so that one mistake gives one message.
    """
    named = {word.rstrip(":,;") for problem in problems for word in problem.split()}
    flags = (flag for flag in flag_specifications().values() if flag.group not in HARMLESS_GROUPS)
    yield from _without_effect(arguments, (flag for flag in flags if not named & {flag.flag, flag.negated_flag}))


def need_notes(arguments: Arguments) -> Iterator[str]:
    """Yield notes about harmless flags without effect, and about flags that another one replaces."""
    flags = (flag for flag in flag_specifications().values() if flag.group in HARMLESS_GROUPS)
    yield from _without_effect(arguments, flags)
    for flag in flag_specifications().values():
        value = flag.value_in(arguments)
        if flag.replaced_by and value != flag.default and _holds(arguments, flag.replaced_by):
            replacement = flag_specifications()[flag.replaced_by].flag
            yield f"{_as_typed(flag, value)} has no effect with {replacement}, which takes its place"


def _without_effect(arguments: Arguments, flags: Iterable[FlagSpecification]) -> Iterator[str]:
    idle: dict[tuple[str, ...], list[str]] = {}
    for flag in flags:
        value = flag.value_in(arguments)
        if flag.needs and value != flag.default and not any(_holds(arguments, need) for need in flag.needs):
            idle.setdefault(flag.needs, []).append(_as_typed(flag, value))
    for needs, given in idle.items():
        yield f"{_joined(given, 'and')} {'has' if len(given) == 1 else 'have'} no effect without {_alternatives(needs)}"


def _holds(arguments: Arguments, need: str) -> bool:
    name, equals, wanted = need.partition("=")
    value = flag_specifications()[name].value_in(arguments)
    if not equals:
        return value not in (None, False, 0, ())
    if wanted == "own":
        return isinstance(value, str) and re.fullmatch(MODULE_ATTR, value) is not None
    return isinstance(value, str) and wanted in (value, *re.split(r"[:+]", value))  # math:1.0+format:0.1


def _alternatives(needs: Sequence[str]) -> str:
    """``--token-advantages kl_in_reward or gae``; user code is left out."""
    pairs = [need.partition("=")[::2] for need in needs if not need.endswith("=own")]
    flags = [
        " ".join(filter(None, (flag_specifications()[name].flag, " or ".join(value for _, value in same if value))))
        for name, same in groupby(pairs, key=lambda pair: pair[0])
    ]
    return _joined(flags, "or")


def _joined(words: Sequence[str], word: str) -> str:
    return f" {word} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _as_typed(flag: FlagSpecification, value: FlagValue) -> str:
    match value:
        case bool():
            return flag.flag if value else flag.negated_flag
        case tuple():
            return " ".join((flag.flag, *value))
        case None:
            return f"{flag.flag} none"
        case Path() | int() | float() | str():
            return f"{flag.flag} {value}"
