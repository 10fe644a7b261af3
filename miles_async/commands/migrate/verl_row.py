"""One key of verl's configuration, and what becomes of it here: a row of the table in ``verl_keys.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class When:
    """The values of another key with which a key counts; None among them: that key is left out."""

    key: str
    values: tuple[str | None, ...]
    others: bool = False  # counts with any value except these

    def holds(self, given: Mapping[str, str]) -> bool:
        return (given.get(self.key) in self.values) != self.others

    def __str__(self) -> str:
        named = " or ".join(filter(None, self.values))
        return f"{self.key} other than {named}" if self.others else f"{self.key}={named}"


@dataclass(frozen=True, slots=True)
class VerlKey:
    """One key, or with ``.*`` at its end all keys below."""

    key: str
    verdict: Literal["works", "noted", "refused"]
    note: str  # works: what it sets; noted: why it changes nothing; refused: what to do
    _: KW_ONLY
    flag: str | None = None  # works: takes the value
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # works: value → our words; others are refused
    only: tuple[str, ...] = ()  # noted: values that change nothing; others are refused
    when: When | None = None  # works: otherwise it changes nothing


def is_flag(key: str, flag: str, when: When | None = None, **unset: str) -> VerlKey:
    """A key that is a flag of ours; ``unset``: a value that means "not at all"."""
    note = f"is `{flag}`, with {when}" if when else f"is `{flag}`"
    return VerlKey(key, "works", note, flag=flag, values={value: () for value in unset.values()}, when=when)


def switch(key: str, *on: str, off: tuple[str, ...] = (), note: str = "") -> VerlKey:
    meanings = [f"{value} is `{' '.join(words)}`" for value, words in (("True", on), ("False", off)) if words]
    return VerlKey(key, "works", note or ", ".join(meanings), values={"True": on, "False": off})


def choice(key: str, note: str, **values: str) -> VerlKey:
    named = {name.removesuffix("_").replace("__", "-"): tuple(words.split()) for name, words in values.items()}
    return VerlKey(key, "works", note, values=named)


def together(key: str, note: str) -> VerlKey:
    """A key that is worked out with others."""
    return VerlKey(key, "works", note)


def noted(key: str, note: str, *only: str) -> VerlKey:
    return VerlKey(key, "noted", note, only=only)


def refused(key: str, note: str) -> VerlKey:
    return VerlKey(key, "refused", note)
