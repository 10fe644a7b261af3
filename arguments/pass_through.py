"""``--sglang-X`` and ``--router-X``: arguments that are not ours and reach SGLang and smg as ``--X``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from miles_async.arguments.renamed_flags import OWNED_PASS_THROUGH_FLAGS

PREFIXES = {"--sglang-": "sglang_extra", "--router-": "router_extra"}
"""Prefix of the flag → field of EnginesArguments that collects it."""

PassThrough = dict[str, tuple[str, ...]]
"""Flag as the user wrote it (``--sglang-cuda-graph-bs``) → its values; of repeated flags the last counts."""


def is_pass_through(flag: str, ours: Collection[str]) -> bool:
    """Return whether ``flag`` is for SGLang or smg. ``--sglang-router-*`` never is: those are ours or a mistake."""
    return (
        flag.startswith(tuple(PREFIXES))
        and flag not in PREFIXES
        and not flag.startswith("--sglang-router-")
        and flag not in ours
        and flag not in OWNED_PASS_THROUGH_FLAGS
    )


def looks_like_flag(word: str) -> bool:
    """``--x`` and ``-x`` are flags, ``-1`` and ``-.5`` are values."""
    return word.startswith("-") and len(word) > 1 and not (word[1].isdigit() or word[1] == ".")


def split_pass_through(words: Sequence[str], ours: Collection[str]) -> tuple[list[str], PassThrough]:
    """(words for our parser, flags for SGLang and smg with all words up to the next flag)."""
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


def flatten(collected: PassThrough) -> dict[str, tuple[str, ...]]:
    """Fields of EnginesArguments: ``{"sglang_extra": ("--foo", "bar"), "router_extra": ()}``."""
    fields: dict[str, list[str]] = {field: [] for field in PREFIXES.values()}
    for flag, values in collected.items():
        prefix = next(prefix for prefix in PREFIXES if flag.startswith(prefix))
        fields[PREFIXES[prefix]] += ["--" + flag[len(prefix) :], *values]
    return {field: tuple(words) for field, words in fields.items()}


def unflatten(extras: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The inverse of :func:`flatten`: (flag as the user wrote it, values)."""
    for prefix, field in PREFIXES.items():
        _, collected = split_pass_through([_prefixed(word, prefix) for word in extras[field]], ours=())
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
