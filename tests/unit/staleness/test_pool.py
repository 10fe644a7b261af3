"""The pool: prompts that it is offered, and its account of where every attempt stands."""

from __future__ import annotations

import msgspec
import pytest

from miles_async.errors import ContractViolation, DataError
from miles_async.staleness import pool as pool_module
from miles_async.staleness.attempts import RetryPolicy
from miles_async.staleness.policy import StalenessPolicy
from miles_async.staleness.pool import Pool
from miles_async.types import Attempt, Changes
from tests.property.builders import make_group, make_prompt


@pytest.fixture
def pool() -> Pool:
    """Two groups per batch, two batches ahead at most, and version 0 is visible."""
    pool = Pool(
        StalenessPolicy(bound=1, lead_batches=2, batch_size=2, action="recycle"),
        RetryPolicy(max_prompt_attempts=1, max_quarantined_prompts=9, recycle_stale=True),
    )
    pool.commit(0)
    return pool


def quarantine(pool: Pool, *prompt_ids: str) -> None:
    for prompt_id in prompt_ids:
        pool.offer(0, make_prompt(prompt_id))
        pool.failed(pool.issue(0), "no reward", infrastructure=False)


def issue(pool: Pool, count: int) -> list[Attempt]:
    """Attempts of as many prompts."""
    attempts = []
    for _ in range(count):
        pool.offer(0, make_prompt(f"p{pool.balance().issued}"))
        attempts.append(pool.issue(0))
    return attempts


def finish(pool: Pool, *attempts: Attempt) -> None:
    for attempt in attempts:
        pool.finished(make_group(attempt, [[0]]))


@pytest.mark.parametrize("most", [0, 50])
def test_quarantined_prompts_are_passed_over_until_there_seem_to_be_no_others(
    pool: Pool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: C3, C6
    monkeypatch.setattr(pool_module, "MOST_PASSED_OVER", most)
    passed_over = [*("p0", "p1", "p2") * 8, *["p0"] * 26][: max(most, 24)]  # a sampler may name one several times
    quarantine(pool, "p0", "p1", "p2")
    for _ in range(2):
        for prompt_id in passed_over:
            pool.offer(0, make_prompt(prompt_id))
            assert pool.needs_prompt()
        pool.offer(0, make_prompt("p3"))  # and the count begins again
        assert not pool.needs_prompt()
        pool.finished(make_group(pool.issue(0), [[0]]))
    for prompt_id in passed_over:
        pool.offer(0, make_prompt(prompt_id))
    with pytest.raises(DataError, match="found only the 3 that are"):
        pool.offer(0, make_prompt("p0"))


def test_a_prompt_is_quarantined_with_cause_and_reason(pool: Pool) -> None:
    quarantine(pool, "p0")
    assert [(letter.prompt_id, letter.reasons) for letter in pool.dead_letters] == [("p0", ("data: no reward",))]
    assert pool.balance().reasons == {"quarantined: data: no reward": 1}


def test_another_prompt_of_a_quarantined_id_is_tried(pool: Pool) -> None:
    """As after a resume with other data: an old prompt that was owed failed, and this row's line was its."""
    # covers: C6
    quarantine(pool, "p0")
    pool.offer(1, make_prompt("p0"))
    assert pool.needs_prompt()
    fixed = msgspec.structs.replace(make_prompt("p0"), label="fixed")
    pool.offer(1, fixed)
    attempt = pool.issue(0)
    assert (attempt.prompt, attempt.data_failures) == (fixed, 0)
    pool.failed(attempt, "still no reward", infrastructure=False)
    pool.offer(2, fixed)
    assert pool.needs_prompt()
    assert len(pool.snapshot().state.book.quarantined) == 1


def test_it_can_move_while_an_attempt_is_in_flight_or_may_be_admitted(pool: Pool) -> None:
    # covers: C10
    finish(pool, *issue(pool, 3))
    assert (pool.room(), pool.balance().in_flight) == (1, 0)
    assert pool.can_move()
    [last] = issue(pool, 1)
    assert (pool.room(), pool.balance().in_flight) == (0, 1)
    assert pool.can_move()
    finish(pool, last)
    assert not pool.can_move()


def test_one_line_says_where_everything_stands(pool: Pool) -> None:
    # covers: C10
    *first, last = issue(pool, 4)
    finish(pool, *first)
    assert pool.cut(0) is not None
    pool.failed(last, "no reward", infrastructure=False)
    assert pool.describe() == (
        "0 attempts in flight, 1 groups buffered, 2 cut, room for 1 more of 4, visible version 0"
    )
    assert pool.can_move()
    assert pool.lead() == 3


def test_a_group_that_the_buffer_has_lost_is_noticed(pool: Pool) -> None:
    # covers: C2
    finish(pool, *issue(pool, 2))
    pool.check()
    pool._buffer.cut(0)
    with pytest.raises(ContractViolation, match="attempts that are buffered in the ledger and nowhere else"):
        pool.check()


def test_an_attempt_that_the_pool_has_lost_is_noticed(pool: Pool) -> None:
    # covers: C2
    [attempt] = issue(pool, 1)
    pool.check()
    del pool._live[attempt.attempt_id]
    with pytest.raises(ContractViolation, match=rf"the ledger and the pool disagree about \[{attempt.attempt_id}\]"):
        pool.check()


def changed(**values: int | None) -> Changes:
    return Changes(after=1, before={}, values=values)


def test_slots_follow_the_bound_and_the_lead_and_nothing_under_way_is_ended(pool: Pool) -> None:
    # covers: C4
    issue(pool, 4)
    assert (pool.capacity, pool.room()) == (4, 0)
    pool.change(changed(max_weight_staleness=2))  # the lead stays: two batches
    assert (pool.capacity, pool.room()) == (4, 0)
    pool.change(changed(max_rollout_lead=3))
    assert (pool.capacity, pool.room()) == (6, 2)
    pool.change(changed(max_weight_staleness=0))
    assert (pool.capacity, pool.room(), pool.lead()) == (2, 0, 4)
    pool.change(changed(max_weight_staleness=None, max_rollout_lead=9))
    assert (pool.capacity, pool.room()) == (18, 14)


def test_a_lower_bound_sweeps_at_the_next_cut(pool: Pool) -> None:
    # covers: C1, C5
    finish(pool, *issue(pool, 2))
    pool.change(changed(max_weight_staleness=0))
    assert pool.balance().buffered == 2
    assert pool.count_stale(1) == 2
    assert pool.cut(1) is None
    summary = pool.balance().summary()
    assert (summary["buffered"], summary["dropped"]) == (0, 2)  # of one attempt each


def test_a_bound_is_not_lowered_where_nothing_may_be_swept() -> None:
    # covers: C5
    policy = StalenessPolicy(bound=None, lead_batches=2, batch_size=2, action="wait")
    pool = Pool(policy, RetryPolicy(max_prompt_attempts=1, max_quarantined_prompts=9, recycle_stale=False))
    pool.change(changed(max_rollout_lead=3))
    with pytest.raises(ContractViolation, match="--stale-group-action wait: the bound changes from None to 5"):
        pool.change(changed(max_weight_staleness=5))
