"""Texts of errors that users' code raises, which may have any length."""

from __future__ import annotations

TEXT_LIMIT = 4000
"""Characters that are kept of the text of an error."""


def shortened(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return a short text as it is, of one longer than ``limit`` characters both ends and how much is left out.

    An eighth more is left alone, such as a shortened text that became part of a sentence.

    >>> shortened("a" * 10 + "b" * 10, limit=8)
    'aaaa ... (12 of 20 characters left out) ... bbbb'
    """
    if len(text) <= limit + limit // 8:
        return text
    half = limit // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]} ... ({left_out} of {len(text)} characters left out) ... {text[-half:]}"
