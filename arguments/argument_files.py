r"""``@file`` arguments: a file's words stand where ``@file`` stood.

A file holds words as a shell would read them, one or many per line, with quotes and ``#`` comments; a ``\\``
at the end of a line is ignored, so that a command can be pasted. ``@other`` inside a file is
relative to that file; every other relative path in it stays relative to the working directory. Nothing is expanded but
``~`` at the beginning of a path: ``$HOME`` stays as written, since regular expressions and texts have a ``$``, too.
``@preset:name`` is the file of that name in the folder presets/ next to this one, which is installed with the package.
``@@user`` is the text ``@user``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from miles_async.arguments.words import did_you_mean
from miles_async.errors import ConfigurationError

_PRESET = "@preset:"


def presets() -> dict[str, Path]:
    """Name of each preset → its file, sorted by folder and name."""
    return {file.stem: file for file in sorted((Path(__file__).parent / "presets").rglob("*.args"))}


def expand_argument_files(words: Sequence[str]) -> list[str]:
    """``words`` with every ``@file`` replaced by what it holds. Raises ConfigurationError naming the file."""
    return list(_expand(words, directory=Path(), including=()))


def as_typed(word: str) -> str:
    """Return the word of a command line that means this text: ``@@user`` for ``@user``."""
    return f"@{word}" if len(word) > 1 and word.startswith("@") else word


def _expand(words: Sequence[str], directory: Path, including: tuple[Path, ...]) -> Iterator[str]:
    for word in words:
        if not (word.startswith("@") and len(word) > 1):
            yield word
            continue
        if word.startswith("@@"):
            yield word[1:]
            continue
        path = _preset(word) if word.startswith(_PRESET) else directory / os.path.expanduser(word[1:])
        if path.resolve() in including:
            raise ConfigurationError(
                f"{word}: argument files include each other: {including[-1]} includes {path} again"
            )
        yield from _expand(_read_words(path, word, including), path.parent, (*including, path.resolve()))


def _preset(word: str) -> Path:
    known = presets()
    if (name := word.removeprefix(_PRESET)) not in known:
        hint = did_you_mean(name, known)
        raise ConfigurationError(f"{word}: there is no such preset; expected one of {', '.join(known)}{hint}")
    return known[name]


def _read_words(path: Path, word: str, including: tuple[Path, ...]) -> list[str]:
    origin = f" (named in {including[-1]})" if including else ""
    if path.suffix == ".toml":
        raise ConfigurationError(f"{word}: {path} is TOML{origin}: give it as --config {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        hint = "" if path.suffix else f"; the text {word!r} is written @{word}"
        raise ConfigurationError(f"{word}: there is no argument file {path}{origin}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{word}: cannot read argument file {path}{origin}: {error}") from None
    words: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            words += split_line(line)
        except ValueError as error:
            raise ConfigurationError(f"{path}:{number}: {error}: {line.strip()!r}") from None
    return words


def split_line(line: str) -> list[str]:
    """Words of a line, as a shell would read them. Raises ValueError."""
    return shlex.split(without_comment(line).rstrip().removesuffix("\\"))


def without_comment(line: str) -> str:
    """``line`` up to a ``#`` that starts a word outside of quotes (shlex would also cut inside of words)."""
    for index, character in outside_quotes(line):
        if character == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line


def outside_quotes(line: str) -> Iterator[tuple[int, str]]:
    """(place, character) of each character that a shell would read as neither quoted nor escaped."""
    quote, escaped = "", False
    for index, character in enumerate(line):
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            yield index, character
