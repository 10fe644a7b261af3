"""Where prompts come from: files, folders that ``datasets`` saved, and data sets of the Hugging Face hub."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_async.errors import ConfigurationError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
EXPECTED = "a .jsonl (also .gz, .zst) or .parquet file, a folder that datasets saved, or hf:NAME"
HUB = "hf:"


@dataclass(frozen=True, slots=True)
class HubName:
    """``hf:NAME[@REVISION][[:CONFIG]:SPLIT]``."""

    name: str
    revision: str | None = None  # a branch, a tag or a commit
    config: str | None = None
    split: str = "train"

    def at(self, commit: str) -> str:
        """The same data set, pinned to a commit, as it is typed."""
        config = f":{self.config}" if self.config else ""
        return f"{HUB}{self.name}@{commit}{config}:{self.split}"


def hub_name(place: str) -> HubName:
    """Raises ConfigurationError.

    >>> hub_name("hf:openai/gsm8k:main:test")
    HubName(name='openai/gsm8k', revision=None, config='main', split='test')
    """
    word = r"[\w.\-]+"
    found = re.fullmatch(rf"hf:({word}(?:/{word})?)(?:@([\w.\-/]+))?((?::[^:]+){{0,2}})", place)
    if found is None:
        raise ConfigurationError(
            f"{place}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, each with @REVISION after the name if "
            "it is to be another than the newest, such as hf:openai/gsm8k:main:train"
        )
    parts = found[3].split(":")[1:]
    return HubName(
        name=found[1],
        revision=found[2],
        config=parts[0] if len(parts) == 2 else None,
        split=parts[-1] if parts else "train",
    )


def split_slice(place: str) -> tuple[str, slice | None]:
    """Place and rows of ``FILE@[FIRST:END]``, as Python slices. Raises ConfigurationError for other text after ``@[``.

    >>> split_slice("train.jsonl@[:100]")
    ('train.jsonl', slice(None, 100, None))
    """
    name, marked, text = place.partition("@[")
    if not marked or place.endswith(SUFFIXES):
        return place, None
    found = re.fullmatch(r"(-?\d*):(-?\d*)\]", text)
    if found is None or "-" in found.groups():
        raise ConfigurationError(
            f"{place}: expected FILE@[FIRST:END], such as {Path(name).name}@[0:100] for the first 100 rows"
        )
    first, end = (int(number) if number else None for number in found.groups())
    return name, slice(first, end)


def default_name(place: str) -> str:
    """Default name of a data set: its file name without the suffix.

    >>> default_name("data/train.jsonl.gz@[:9]"), default_name("hf:openai/gsm8k:main:test")
    ('train', 'gsm8k')
    """
    place, _ = split_slice(place)
    if place.startswith(HUB):
        return hub_name(place).name.rpartition("/")[2]
    name = Path(place).name
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def named_places(words: Sequence[str], flag: str) -> list[tuple[str | None, str]]:
    """(name before it, place) of ``[NAME] PLACE ...``. Raises ConfigurationError, which begins with ``flag``.

    >>> named_places(["aime", "data/aime-2025.jsonl", "test.parquet"], "--eval-prompt-data")
    [('aime', 'data/aime-2025.jsonl'), (None, 'test.parquet')]
    """
    found: list[tuple[str | None, str]] = []
    name: str | None = None
    for word in words:
        try:
            file, _ = split_slice(word)
            is_place = _is_place(file)
        except ConfigurationError as error:
            raise ConfigurationError(f"{flag} {error}") from None
        if is_place:
            found.append((name, word if word.startswith(HUB) else os.path.expanduser(word)))
            name = None
        elif name is not None or "/" in word or not word:
            raise ConfigurationError(f"{flag}: expected {EXPECTED}; found {word!r}")
        else:
            name = word
    if name is not None:
        folder = " (a folder has a / in its name: ./folder)" if "." not in name else ""
        raise ConfigurationError(f"{flag}: expected {EXPECTED} after the name {name!r}{folder}")
    return found


def _is_place(word: str) -> bool:
    """A folder is known by a slash; one whose last name has a dot, by a slash at its end."""
    if word.startswith(HUB):
        return bool(hub_name(word))
    return word.endswith(SUFFIXES) or ("/" in word and (word.endswith("/") or not Path(word).suffix))


def absolute(place: str) -> str:
    """The place from any working directory."""
    return place if place.startswith(HUB) else os.path.join(os.getcwd(), place)


def absolute_words(words: Sequence[str]) -> tuple[str, ...]:
    """Words of ``--prompt-data`` with absolute places."""
    pairs = named_places(words, "--prompt-data")
    return tuple(word for name, place in pairs for word in (*([name] if name else []), absolute(place)))


def parse_weights(words: Sequence[str], files: int) -> tuple[float, ...]:
    """Weights of ``--prompt-data-weights``. Raises ConfigurationError unless there is one above 0 for each file.

    >>> parse_weights(["3", "0.5"], 2)
    (3.0, 0.5)
    """
    try:
        weights = tuple(float(word) for word in words)
    except ValueError:
        weights = ()
    if len(weights) != files or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigurationError(
            f"--prompt-data-weights {' '.join(words)}: expected a number above 0 for each of the {files} files of "
            "--prompt-data"
        )
    return weights
