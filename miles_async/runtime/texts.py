"""Untrusted texts of any length: shortening, last lines, and escaping for a terminal."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import IO

TEXT_LIMIT = 4000
"""Characters that are kept of the text of an error."""

_ESCAPED = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories: control, format (bidirectional marks, zero width), surrogates, private use, separators."""


def shortened(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return a short text as it is; of one longer than ``limit`` characters, both ends and the count left out.

    An eighth more is left alone, such as a shortened text that became part of a sentence.

    >>> shortened("a" * 10 + "b" * 10, limit=8)
    'aaaa ... (12 of 20 characters left out) ... bbbb'
    """
    if len(text) <= limit + limit // 8:
        return text
    half = limit // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]} ... ({left_out} of {len(text)} characters left out) ... {text[-half:]}"


def last_lines(path: Path, most_bytes: int) -> list[str]:
    """Return the lines in the last ``most_bytes`` of a file; the first may be cut. Empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return last_lines_of(file, most_bytes)
    except OSError:
        return []


def last_lines_of(file: IO[bytes], most_bytes: int) -> list[str]:
    """Like :func:`last_lines`, for an open file."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
    return file.read(most_bytes).decode(errors="replace").strip().splitlines()


def escaped(text: str, *, keep: str = "") -> str:
    r"""Write control, bidirectional and other invisible characters as Python escapes, except those in ``keep``:
    what a model wrote must not move the cursor, change colours or reverse the line.

    >>> escaped("a\x1b[2Jb\u202e\n", keep="\n")
    'a\\x1b[2Jb\\u202e\n'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) if character not in keep else character for character in text)


def _shown(character: str) -> str:
    hidden = unicodedata.category(character) in _ESCAPED
    return character.encode("unicode_escape").decode() if hidden else character
