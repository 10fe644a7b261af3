"""Registry of metric names: source of hovers in `miles-async watch`, of Prometheus' HELP and of the site's tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import msgspec

FILE = Path(__file__).with_suffix(".toml")
OTHER = "Other"

_CODE = re.compile(r"`([^`]+)`")
_ANY = re.compile(r"\.\.\.|\b[A-Z]+\b|(?<=_)N\b")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")

Unit = Literal[
    "reward", "share", "percent", "ratio", "nats", "number", "seconds", "bytes", "times",
    "tokens", "sequences", "samples", "groups", "turns", "calls", "requests", "versions", "steps",
    "engines", "services", "tensors",
]  # fmt: skip
"""``reward``: the reward's own unit; ``number``: without a unit, or with one that users choose."""


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Metrics that share unit and meaning. All cells but the unit are Markdown."""

    names: str
    unit: Unit
    meaning: str
    worries: str  # when to look closer; empty: no value by itself is a reason


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A section of the site's page of metrics."""

    title: str
    before: str = ""
    after: str = ""
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """Section, position and meaning of one metric; texts are plain, and empty for a metric that no row describes."""

    section: str
    section_rank: int
    rank: int  # in its section
    unit: Unit
    meaning: str
    worries: str


@cache
def sections() -> tuple[Section, ...]:
    """All sections, in the order of the page."""
    return msgspec.toml.decode(FILE.read_bytes(), type=dict[str, tuple[Section, ...]])["sections"]


@lru_cache(maxsize=10_000)
def describe(name: str) -> Description:
    """Look up a metric: the row that names it, else the first row whose pattern matches.

    >>> describe("train/logprob_diff/age_3/p99").section
    'Training'
    """
    exact, patterns = _rows()
    if name in exact:
        return exact[name]
    fitting = (found for pattern, found in patterns if pattern.fullmatch(name))
    nothing = Description(section=OTHER, section_rank=len(sections()), rank=0, unit="number", meaning="", worries="")
    return next(fitting, nothing)


@cache
def _rows() -> tuple[dict[str, Description], list[tuple[re.Pattern[str], Description]]]:
    exact: dict[str, Description] = {}
    patterns: list[tuple[re.Pattern[str], Description]] = []
    for section_rank, section in enumerate(sections()):
        for rank, row in enumerate(section.rows):
            found = Description(
                section=section.title,
                section_rank=section_rank,
                rank=rank,
                unit=row.unit,
                meaning=_plain(row.meaning),
                worries=_plain(row.worries),
            )
            for name in names_in(row.names):
                if _ANY.search(name):
                    patterns.append((_pattern(name), found))
                else:
                    exact.setdefault(name, found)
    patterns.sort(key=lambda pair: -len(pair[0].pattern))  # the most specific one first
    return exact, patterns


def _plain(cell: str) -> str:
    return _LINK.sub(r"\1", cell).replace("`", "").replace("*", "")


def names_in(cell: str) -> Iterator[str]:
    """Names in the first cell of a row, with `.../p99` completed by the name before it.

    >>> list(names_in("`rollout/finish_reason/stop`, `.../length`"))
    ['rollout/finish_reason/stop', 'rollout/finish_reason/length']
    """
    before = ""
    for name in _CODE.findall(cell):
        if name.startswith(".../"):
            name = f"{before.rpartition('/')[0]}/{name.removeprefix('.../')}"
        before = name
        yield name


def _pattern(name: str) -> re.Pattern[str]:
    parts, at = [], 0
    for match in _ANY.finditer(name):
        parts += [re.escape(name[at : match.start()]), ".+" if match[0] == "..." else "[^/]+"]
        at = match.end()
    return re.compile("".join([*parts, re.escape(name[at:])]))
