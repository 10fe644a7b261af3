"""``--sglang-X``, ``--router-X``, ``--megatron-X``: arguments that are not ours and reach SGLang, smg and Megatron."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from miles_async.arguments.foreign import FOREIGN_FLAGS
from miles_async.arguments.words import looks_like_flag


class Collector(NamedTuple):
    """Field of an argument group that collects flags."""

    group: str
    field: str


PREFIXES = {
    "--sglang-": Collector("engines", "sglang_extra"),
    "--router-": Collector("engines", "router_extra"),
    "--megatron-": Collector("model", "megatron_extra"),
}
"""Prefix of the flag → where it is collected."""

PassThrough = dict[str, tuple[str, ...]]
"""Flag as the user wrote it (``--sglang-cuda-graph-bs-decode``) → its values; of repeated flags the last counts."""


def is_pass_through(flag: str, ours: Collection[str]) -> bool:
    """Return whether ``flag`` is passed on. ``--sglang-router-*`` never is: those are ours or a mistake."""
    return (
        flag.startswith(tuple(PREFIXES))
        and flag not in PREFIXES
        and not flag.startswith("--sglang-router-")
        and flag not in ours
        and flag not in FOREIGN_FLAGS
    )


def collector(flag: str) -> Collector:
    """Field that collects a flag that is passed on."""
    return next(where for prefix, where in PREFIXES.items() if flag.startswith(prefix))


def split_pass_through(words: Sequence[str], ours: Collection[str]) -> tuple[list[str], PassThrough]:
    """(words for our parser, flags that are passed on with all words up to the next flag)."""
    remaining: list[str] = []
    collected: PassThrough = {}
    current: str | None = None
    for word in words:
        name, equals, value = word.partition("=")
        if looks_like_flag(word):
            current = name if is_pass_through(name, ours) else None
            if current:
                collected[current] = (value,) if equals else ()
                continue
        if current:
            collected[current] += (word,)
        else:
            remaining.append(word)
    return remaining, collected


def flatten(collected: PassThrough) -> dict[Collector, tuple[str, ...]]:
    """Words of each field: ``{("engines", "sglang_extra"): ("--foo", "bar"), ("engines", "router_extra"): ()}``."""
    fields: dict[Collector, list[str]] = {where: [] for where in PREFIXES.values()}
    for flag, values in collected.items():
        prefix = next(prefix for prefix in PREFIXES if flag.startswith(prefix))
        fields[PREFIXES[prefix]] += ["--" + flag[len(prefix) :], *values]
    return {where: tuple(words) for where, words in fields.items()}


def unflatten(extras: Mapping[Collector, Sequence[str]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The inverse of :func:`flatten`: (flag as the user wrote it, values)."""
    for prefix, where in PREFIXES.items():
        _, collected = split_pass_through([_prefixed(word, prefix) for word in extras.get(where, ())], ours=())
        yield from collected.items()


def _prefixed(word: str, prefix: str) -> str:
    return prefix + word[2:] if word.startswith("--") else word


def values_from_toml(value: object) -> tuple[str, ...]:
    """``true`` is a flag without value, a list several values. Raises ValueError for anything else."""
    if value is True:
        return ()
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        raise ValueError(f"expected true, a text, a number or a list of these, found {value!r}")
    return tuple(str(item) for item in items)
