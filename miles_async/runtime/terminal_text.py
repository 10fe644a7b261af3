"""Untrusted text for a terminal: what a model wrote must not move the cursor, change colours or reverse the line."""

from __future__ import annotations

import unicodedata

_ESCAPED = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories: control, format (bidirectional marks, zero width), surrogates, private use, separators."""


def escaped(text: str, *, keep: str = "") -> str:
    r"""Write control, bidirectional and other invisible characters as Python escapes, except those in ``keep``.

    >>> escaped("a\x1b[2Jb\u202e\n", keep="\n")
    'a\\x1b[2Jb\\u202e\n'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) if character not in keep else character for character in text)


def _shown(character: str) -> str:
    hidden = unicodedata.category(character) in _ESCAPED
    return character.encode("unicode_escape").decode() if hidden else character
