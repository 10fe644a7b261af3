"""Every attempt ends exactly once.

# covers: C2, M3
"""

from __future__ import annotations

import msgspec
import pytest

from miles_async.errors import ContractViolation
from miles_async.staleness.ledger import MOST_REASONS, Ledger, LedgerState, Outcome, Stage
from tests.property.builders import make_attempt


def read_back(state: LedgerState) -> LedgerState:
    """From a file that it was written to."""
    return msgspec.json.decode(msgspec.json.encode(state), type=LedgerState)


def issued(count: int) -> Ledger:
    ledger = Ledger()
    for attempt_id in range(count):
        ledger.issue(make_attempt(attempt_id))
    return ledger


def test_way_of_a_trained_attempt() -> None:
    ledger = issued(1)
    assert ledger.balance().in_flight == 1
    ledger.buffered(0)
    assert ledger.balance().buffered == 1
    ledger.cut([0], target_version=3)
    assert ledger.balance().cut == 1
    assert ledger.live()[0].target_version == 3
    ledger.end(0, Outcome.TRAINED)
    assert ledger.live() == ()
    assert ledger.balance().ended["trained"] == 1


def test_balance_counts_outcomes_and_reasons_and_adds_up() -> None:
    ledger = issued(6)
    ledger.buffered(0)
    ledger.end(0, Outcome.STALE_RECYCLED, "age 3")
    ledger.end(1, Outcome.FAILED, "reward took too long")
    ledger.end(2, Outcome.FAILED, "reward took too long")
    ledger.end(3, Outcome.FILTERED, "zero spread")
    ledger.end(4, Outcome.CANCELLED)
    balance = ledger.balance()
    assert balance.reasons == {
        "stale_recycled: age 3": 1,
        "failed: reward took too long": 2,
        "filtered: zero spread": 1,
    }
    assert balance.summary() == {
        "issued": 6, "recycled": 1, "dropped": 0, "trained": 0, "filtered": 1, "failed": 2, "quarantined": 0,
        "cancelled": 1, "in_flight": 1, "buffered": 0, "cut": 0,
    }  # fmt: skip
    ledger.check([])


def test_reasons_that_all_differ_are_counted_together_from_some_number_on() -> None:
    ledger = issued(MOST_REASONS + 4)
    for attempt_id in range(MOST_REASONS + 2):
        ledger.end(attempt_id, Outcome.FAILED, f"error {attempt_id}")
    ledger.end(MOST_REASONS + 2, Outcome.FAILED, "error 0")
    ledger.end(MOST_REASONS + 3, Outcome.QUARANTINED, "error 0")
    reasons = ledger.balance().reasons
    assert reasons["failed: error 0"] == 2
    assert reasons["failed: other reasons"] == 2
    assert reasons["quarantined: other reasons"] == 1
    assert len(reasons) == MOST_REASONS + 2
    assert sum(reasons.values()) == MOST_REASONS + 4
    ledger.check([])


def test_ending_twice_is_a_violation() -> None:
    ledger = issued(2)
    ledger.end(1, Outcome.FAILED)
    with pytest.raises(ContractViolation, match=r"ended already \[1\], never issued \[\]"):
        ledger.end(1, Outcome.FAILED)


def test_ending_an_attempt_that_was_never_issued_is_a_violation() -> None:
    with pytest.raises(ContractViolation, match=r"never issued \[7\]"):
        issued(2).end(7, Outcome.FAILED)


def test_only_attempts_that_were_cut_can_be_trained() -> None:
    with pytest.raises(ContractViolation, match=r"cannot end as trained from in_flight.*'prompts.jsonl:0'"):
        issued(1).end(0, Outcome.TRAINED)


def test_attempts_aborted_while_they_were_generated_are_counted_apart() -> None:  # covers: C5
    ledger = issued(3)
    ledger.end(0, Outcome.STALE_RECYCLED, "aborted at age 3")
    ledger.buffered(1)
    ledger.end(1, Outcome.STALE_DROPPED, "age 3")
    assert ledger.balance().aborted == 1
    restored = Ledger()
    restored.restore(ledger.state())
    assert restored.balance().aborted == Ledger.saved_balance(ledger.state()).aborted == 1


def test_an_attempt_that_was_cut_cannot_become_stale() -> None:
    ledger = issued(1)
    ledger.buffered(0)
    ledger.cut([0], 1)
    with pytest.raises(ContractViolation, match="cannot end as stale_recycled from cut"):
        ledger.end(0, Outcome.STALE_RECYCLED)


def test_cutting_an_attempt_in_flight_names_it() -> None:
    ledger = issued(2)
    ledger.buffered(0)
    with pytest.raises(ContractViolation, match="attempt_id=1"):
        ledger.cut([0, 1], 1)
    with pytest.raises(ContractViolation, match="distinct"):
        ledger.cut([0, 0], 1)
    assert ledger.balance().buffered == 1


def test_attempt_ids_are_never_reused() -> None:
    with pytest.raises(ContractViolation, match="expected an attempt id above 1, found 1"):
        issued(2).issue(make_attempt(1))
    with pytest.raises(ContractViolation, match="expected an attempt id above -1, found -1"):
        issued(0).issue(make_attempt(-1))


def test_check_names_what_the_ledger_and_the_parts_disagree_about() -> None:
    ledger = issued(3)
    ledger.buffered(0)
    ledger.check([0])
    with pytest.raises(ContractViolation, match=r"buffered in the ledger and nowhere else: .*attempt_id=0"):
        ledger.check([])
    with pytest.raises(ContractViolation, match=r"held as buffered but not in the ledger: .*attempt_id=1.*, 9\]"):
        ledger.check([0, 1, 9])


def test_check_finds_a_lost_row() -> None:
    ledger = issued(3)
    del ledger._rows[1]
    with pytest.raises(ContractViolation, match="issued ≠ in flight"):
        ledger.check([])


def test_the_balance_of_a_saved_ledger_is_read_without_restoring_it() -> None:
    ledger = issued(4)
    for attempt_id in (0, 1):
        ledger.buffered(attempt_id)
    ledger.cut([1], 2)
    ledger.end(3, Outcome.FAILED, "boom")
    assert Ledger.saved_balance(read_back(ledger.state())) == ledger.balance()


def test_a_saved_state_does_not_follow_the_ledger() -> None:
    ledger = issued(1)
    state = ledger.state()
    ledger.buffered(0)
    assert [row.stage for row in state.live] == [Stage.IN_FLIGHT]


def test_attempts_that_ended_since_an_earlier_balance() -> None:
    ledger = issued(9)
    for attempt_id, outcome in enumerate((Outcome.STALE_RECYCLED, Outcome.FAILED)):
        ledger.end(attempt_id, outcome)
    earlier = ledger.balance()
    ends = (Outcome.STALE_RECYCLED, Outcome.STALE_DROPPED, Outcome.STALE_DROPPED, Outcome.FILTERED, Outcome.FAILED)
    ledger.buffered(3)
    for attempt_id, outcome in enumerate((*ends, Outcome.QUARANTINED), start=2):
        ledger.end(attempt_id, outcome)
    assert ledger.balance().ended_since(earlier) == {
        "stale": 3, "aborted": 2, "recycled": 1, "dropped": 2, "filtered": 1, "failed": 1, "quarantined": 1,
    }  # fmt: skip


def test_resume_goes_on_counting_and_cancels_attempts_of_the_old_process() -> None:
    ledger = issued(3)
    ledger.buffered(0)
    ledger.end(1, Outcome.FAILED, "boom")
    state = read_back(ledger.state())
    resumed = Ledger()
    lost = resumed.restore(state)
    assert [row.prompt_id for row in lost] == ["prompts.jsonl:0", "prompts.jsonl:2"]
    assert resumed.balance().ended == ledger.balance().ended | {Outcome.CANCELLED: 2}
    assert resumed.balance().reasons == {"failed: boom": 1, "cancelled: restart": 2}
    resumed.issue(make_attempt(3))
    resumed.check([])
    assert resumed.balance().issued == 4
