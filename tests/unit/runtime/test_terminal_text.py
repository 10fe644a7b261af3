"""Untrusted text is shown, not obeyed."""

from __future__ import annotations

import pytest

from miles_async.runtime.texts import escaped


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text", "plain text"),
        ("über 漢字 ✓ ▁x", "über 漢字 ✓ ▁x"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("a\u202eb\u2066c\u200fd", "a\\u202eb\\u2066c\\u200fd"),
        ("\u2028\u200b\ue000", "\\u2028\\u200b\\ue000"),
        ("line\nnext\ttab", "line\\nnext\\ttab"),
    ],
)
def test_characters_that_a_terminal_obeys_are_escaped(text: str, expected: str) -> None:
    assert escaped(text) == expected


def test_lines_and_tabs_can_be_kept() -> None:
    assert escaped("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"
