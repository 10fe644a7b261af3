"""Untrusted texts: of any length, of which a bounded part is kept, and shown by a terminal, not obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.errors import ServiceUnavailableError, UserCodeError
from miles_async.runtime.services import _text
from miles_async.runtime.texts import TEXT_LIMIT, escaped, last_lines, shortened
from miles_async.runtime.user_code import call_user_code, raised, run_user_code

BOUND = TEXT_LIMIT + 200  # with the note


def test_a_short_text_stays_and_a_long_one_keeps_both_ends():
    assert shortened("a" * TEXT_LIMIT) == "a" * TEXT_LIMIT
    text = shortened("first" + "x" * 100_000 + "last")
    assert len(text) < BOUND
    assert text.startswith("first")
    assert text.endswith("last")
    assert f"({100_009 - TEXT_LIMIT} of 100009 characters left out)" in text


def test_what_was_shortened_is_not_shortened_again():
    text = f"data: reward {shortened('x' * 100_000)}"
    assert shortened(text) == text


@pytest.mark.parametrize("error", [ValueError("x" * 100_000), UserCodeError("x" * 100_000)])
def test_what_user_code_raised_is_told_at_a_bounded_length(error: Exception):
    assert len(raised(error)) < BOUND
    assert "characters left out" in raised(error)


async def test_the_error_for_what_is_no_exception_is_bounded_too():
    def ends() -> None:
        raise SystemExit("x" * 100_000)

    async def ends_later() -> None:
        ends()

    with pytest.raises(UserCodeError) as caught:
        call_user_code(ends)
    assert len(str(caught.value)) < BOUND
    with pytest.raises(UserCodeError) as caught:
        await run_user_code(ends_later())
    assert len(str(caught.value)) < BOUND


@pytest.mark.parametrize("error", [ServiceUnavailableError("x" * 100_000), ConnectionError("x" * 100_000)])
def test_the_failure_of_a_service_is_bounded(error: Exception):
    assert len(_text(error)) < BOUND


def test_no_more_than_the_end_of_a_file_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log, 100) == []
    log.write_bytes(b"one\ntwo\nthr\xffee\n\n")
    assert last_lines(log, 100) == ["one", "two", "thr\ufffdee"]
    assert last_lines(log, 10) == ["o", "thr\ufffdee"]


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
