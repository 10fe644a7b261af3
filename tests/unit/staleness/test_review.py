"""Attempts in flight that are certainly too old, and their end."""

from __future__ import annotations

import pytest

from miles_async.errors import ContractViolation
from miles_async.staleness.attempts import RetryPolicy
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool
from miles_async.staleness.versions import OldestVersions
from tests.property.builders import make_prompt

RETRIES = RetryPolicy(max_prompt_attempts=2, max_quarantined_prompts=0, recycle_stale=True)


def pool_with_an_attempt(*, action: str = "recycle", min_samples: int | None = None, bound: int | None = 1) -> Pool:
    policy = StalenessPolicy(bound=bound, lead_batches=2, batch_size=1, action=action, min_samples=min_samples)
    pool = Pool(policy, RETRIES)
    pool.commit(0)
    pool.offer(0, make_prompt("p0"))
    pool.issue(0)
    return pool


def test_an_attempt_that_is_too_old_for_every_cut_to_come_ends_as_stale() -> None:  # covers: C3, C5
    pool = pool_with_an_attempt()
    room = pool.room()
    assert pool.in_doubt(2) == [0]
    assert pool.review(0, {0: 0, 1: None}, 2) == {0, 1}
    assert pool.room() == room + 1
    balance = pool.balance()
    assert (balance.aborted, balance.reasons) == (1, {"stale_recycled: aborted at age 2": 1})
    assert not pool.needs_prompt()  # its prompt is owed another attempt
    pool.check()


def test_a_sample_at_the_bound_or_of_any_version_is_finished() -> None:  # covers: C5
    pool = pool_with_an_attempt()
    assert pool.in_doubt(1) == []  # age 1 is fresh
    assert pool.review(0, {0: 1, 1: None}, 2) == frozenset()
    assert pool.balance().in_flight == 1


def test_a_group_goes_on_while_enough_of_its_samples_may_be_fresh() -> None:  # covers: C7
    pool = pool_with_an_attempt(min_samples=2)
    assert pool.review(0, {0: 0, 1: 1, 2: None}, 2) == {0}
    assert pool.balance().in_flight == 1
    assert pool.review(0, {1: 1, 2: None}, 3) == {1, 2}
    assert pool.balance().aborted == 1


@pytest.mark.parametrize("options", [{"action": "wait"}, {"bound": None}])
def test_who_waits_and_who_has_no_bound_aborts_nothing(options: dict[str, str | None]) -> None:  # covers: C5
    pool = pool_with_an_attempt(**options)  # type: ignore[arg-type]
    assert pool.review(0, {0: 0, 1: 0}, 9) == frozenset()
    assert pool.balance().in_flight == 1


def test_no_cut_is_for_an_older_version_than_attempts_were_aborted_for() -> None:  # covers: C5
    pool = pool_with_an_attempt()
    pool.review(0, {0: 0}, 2)
    with pytest.raises(ContractViolation, match="a cut for version 1"):
        pool.cut(1)
    assert pool.cut(2) is None


def test_a_request_tells_what_its_sample_is_as_old_as_until_tokens_are_kept() -> None:
    dispatched = {"0-0": 5}
    oldest_versions = OldestVersions(dispatched.get)
    assert oldest_versions.oldest("0-0") is None  # nobody's sample: an evaluation's
    oldest_versions.watch("0-0")
    assert oldest_versions.oldest("0-0") == 5
    dispatched["0-0"] = 6  # that try was lost
    assert oldest_versions.oldest("0-0") == 6
    oldest_versions.note("0-0", 6)
    dispatched["0-0"] = 8  # what a publication aborted goes on under another version
    assert oldest_versions.oldest("0-0") == 6
    oldest_versions.note("0-0", 8)
    assert oldest_versions.oldest("0-0") == 6
    oldest_versions.forget("0-0")
    oldest_versions.note("0-0", 3)  # late word of what failed
    oldest_versions.watch("0-0")
    assert oldest_versions.oldest("0-0") == 8


def test_where_requests_tell_nothing_only_kept_tokens_count() -> None:
    oldest_versions = OldestVersions()
    oldest_versions.watch("0-0")
    assert oldest_versions.oldest("0-0") is None
    oldest_versions.note("0-0", 4)
    assert oldest_versions.oldest("0-0") == 4
