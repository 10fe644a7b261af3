"""Decisions about a prompt whose attempt ended untrained.

# covers: C5, C6, O2, M7, M8
"""

from __future__ import annotations

import itertools

import msgspec
import pytest

from miles_async.errors import DataError
from miles_async.staleness.attempts import AttemptBook, BookState, Cause, RetryPolicy
from miles_async.staleness.ledger import Outcome
from miles_async.types import Prompt
from tests.property.builders import make_prompt


class Source:
    """Prompts p0, p1, ... in a circle."""

    def __init__(self, size: int = 100) -> None:
        self._numbers = itertools.cycle(range(size))

    def __call__(self) -> tuple[int, Prompt]:
        return 0, make_prompt(f"p{next(self._numbers)}")


def read_back(state: BookState) -> BookState:
    """From a file that it was written to."""
    return msgspec.json.decode(msgspec.json.encode(state), type=BookState)


def book(*, attempts: int = 2, quarantined: int = 100, recycle: bool = True) -> AttemptBook:
    return AttemptBook(
        RetryPolicy(max_prompt_attempts=attempts, max_quarantined_prompts=quarantined, recycle_stale=recycle)
    )


def test_attempts_are_numbered_and_carry_the_visible_version() -> None:
    attempts, source = book(), Source()
    first, second = attempts.issue(source, 3), attempts.issue(source, 4)
    assert [(a.attempt_id, a.prompt.prompt_id, a.issued_version) for a in (first, second)] == [
        (0, "p0", 3),
        (1, "p1", 4),
    ]


def test_stale_prompt_is_recycled_before_fresh_ones() -> None:
    attempts, source = book(), Source()
    first = attempts.issue(source, 0)
    assert attempts.ended(first, Cause.STALE, "age 3") is Outcome.STALE_RECYCLED
    again = attempts.issue(source, 5)
    assert (again.attempt_id, again.prompt, again.stale_count, again.issued_version) == (1, first.prompt, 1, 5)
    assert (again.data_failures, again.infra_failures) == (0, 0)
    assert attempts.issue(source, 5).prompt.prompt_id == "p1"


def test_drop_replaces_a_stale_prompt_by_a_fresh_one() -> None:
    attempts, source = book(recycle=False), Source()
    outcome = attempts.ended(attempts.issue(source, 0), Cause.STALE, "age 3")
    assert (outcome, attempts.waiting_retries) == (Outcome.STALE_DROPPED, 0)
    assert attempts.issue(source, 0).prompt.prompt_id == "p1"


def test_a_dropped_prompt_is_not_owed_another_attempt() -> None:
    # covers: O3
    attempts, source = book(recycle=False), Source()
    dropped = attempts.issue(source, 0)
    attempts.ended(dropped, Cause.STALE, "age 3")
    assert attempts.waiting_retries == 0
    resumed = book(recycle=False)
    resumed.restore(read_back(attempts.state()))
    issued = [resumed.issue(source, 0).prompt.prompt_id for _ in range(10)]
    assert dropped.prompt.prompt_id not in issued


def test_slow_prompt_is_dropped_in_the_end_but_never_quarantined() -> None:
    attempts, source = book(attempts=2), Source()
    attempts.ended(attempts.issue(source, 0), Cause.STALE, "age 3")
    outcome = attempts.ended(attempts.issue(source, 0), Cause.STALE, "age 4")
    assert (outcome, attempts.dead_letters) == (Outcome.STALE_DROPPED, ())


def test_filtered_prompt_is_replaced() -> None:
    attempts, source = book(attempts=1), Source()
    outcome = attempts.ended(attempts.issue(source, 0), Cause.FILTERED, "zero spread")
    assert (outcome, attempts.waiting_retries) == (Outcome.FILTERED, 0)


def test_prompt_that_engines_fail_is_dropped_in_the_end_but_never_quarantined() -> None:
    attempts, source = book(attempts=2), Source()
    attempts.ended(attempts.issue(source, 0), Cause.INFRASTRUCTURE, "connection cut")
    assert attempts.waiting_retries == 1
    outcome = attempts.ended(attempts.issue(source, 0), Cause.INFRASTRUCTURE, "connection cut")
    assert (outcome, attempts.dead_letters, attempts.waiting_retries) == (Outcome.FAILED, (), 0)
    assert attempts.issue(source, 0).prompt.prompt_id == "p1"


def test_failing_prompt_is_quarantined_with_its_reasons() -> None:
    cause = Cause.DATA
    attempts, source = book(attempts=2), Source()
    assert attempts.ended(attempts.issue(source, 0), cause, "no reward") is Outcome.FAILED
    assert attempts.ended(attempts.issue(source, 0), cause, "no reward again") is Outcome.QUARANTINED
    (letter,) = attempts.dead_letters
    assert letter.prompt_id == "p0"
    assert letter.reasons == (f"{cause}: no reward", f"{cause}: no reward again")


def test_each_cause_has_its_own_budget() -> None:
    attempts, source = book(attempts=2), Source()
    for cause in (Cause.DATA, Cause.INFRASTRUCTURE, Cause.STALE):
        attempt = attempts.issue(source, 0)
        attempts.ended(attempt, cause, "once")
        assert attempts.waiting_retries == 1
        assert attempt.prompt.prompt_id == "p0"


def test_a_readmitted_prompt_has_its_whole_budget_again() -> None:
    attempts, source = book(attempts=1), Source()
    attempts.ended(attempts.issue(source, 0), Cause.DATA, "rejected")
    assert attempts.readmit("request", ["p0"]) == ("p0",)
    again = attempts.issue(source, 4)
    assert (again.prompt.prompt_id, again.data_failures, again.infra_failures, again.stale_count) == ("p0", 0, 0, 0)


def test_waiting_retry_of_a_prompt_that_another_epoch_quarantined_is_dropped() -> None:
    attempts, source = book(attempts=2), Source(size=1)
    one, other = attempts.issue(source, 0), attempts.issue(source, 0)
    attempts.ended(one, Cause.DATA, "rejected")
    again = attempts.issue(source, 0)
    attempts.ended(other, Cause.DATA, "rejected")
    assert attempts.waiting_retries == 1
    attempts.ended(again, Cause.DATA, "rejected")
    assert attempts.waiting_retries == 0


def test_too_many_quarantined_prompts_stop_the_run() -> None:
    attempts, source = book(attempts=1, quarantined=1), Source()
    attempts.ended(attempts.issue(source, 0), Cause.DATA, "rejected")
    with pytest.raises(DataError, match="--max-quarantined-prompts 1, found 2; the last is 'p1': data: rejected"):
        attempts.ended(attempts.issue(source, 0), Cause.DATA, "rejected")


def test_when_all_prompts_are_quarantined_the_error_says_why() -> None:
    attempts = book(attempts=1)
    attempts.ended(attempts.issue(Source(), 0), Cause.DATA, "rejected")
    assert "found only the 1 that are; the last is 'p0': data: rejected" in str(attempts.only_quarantined())


def test_resume_keeps_retries_quarantine_and_numbers() -> None:
    attempts, source = book(attempts=2), Source()
    for _ in range(2):
        attempts.ended(attempts.issue(source, 0), Cause.DATA, "rejected")
    attempts.ended(attempts.issue(source, 0), Cause.STALE, "age 3")
    resumed = book()
    resumed.restore(read_back(attempts.state()))
    assert [letter.prompt_id for letter in resumed.dead_letters] == ["p0"]
    again = resumed.issue(source, 7)
    assert (again.attempt_id, again.prompt, again.stale_count) == (3, make_prompt("p1"), 1)
    assert again.history == ("stale: age 3",)
