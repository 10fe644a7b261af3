"""Slots are taken at admission and given back at commits.

# covers: C4, P1
"""

from __future__ import annotations

import pytest

from miles_async.errors import ConfigurationError, ContractViolation
from miles_async.staleness.admission import Admission


def admitted(count: int, capacity: int = 4) -> Admission:
    admission = Admission(capacity)
    for _ in range(count):
        admission.admit()
    return admission


def test_no_room_beyond_the_capacity() -> None:
    admission = admitted(4)
    assert admission.room() == 0
    with pytest.raises(ContractViolation, match="4 attempts are admitted of at most 4"):
        admission.admit()


def test_attempt_that_ends_untrained_is_replaced_at_once() -> None:
    admission = admitted(4)
    admission.leave()
    assert admission.room() == 1


def test_trained_groups_keep_their_slots_until_their_version_is_visible() -> None:
    admission = admitted(4)
    admission.trained(2, leads_to=1)
    assert admission.room() == 0
    admission.commit(1)
    assert admission.room() == 2


def test_publication_frees_only_slots_of_batches_that_led_to_it() -> None:
    """Training may be a batch ahead of publication."""
    admission = admitted(4)
    admission.trained(2, leads_to=1)
    admission.trained(2, leads_to=2)
    admission.commit(1)
    assert admission.room() == 2
    admission.commit(2)
    assert admission.room() == 4


def test_step_without_publication_frees_its_slots() -> None:
    """--update-weights-interval above 1 would stop the run otherwise."""
    admission = admitted(4)
    admission.trained(4, leads_to=1)
    admission.release()
    assert admission.room() == 4


def test_capacity_changes_at_run_time() -> None:
    admission = admitted(4)
    admission.resize(2)
    assert admission.room() == 0
    admission.leave(3)
    assert admission.room() == 1
    admission.resize(6)
    assert admission.room() == 5
    admission.resize(1)
    assert admission.capacity == 1
    with pytest.raises(ConfigurationError, match="--max-rollout-lead"):
        admission.resize(0)


def test_resumed_attempts_hold_slots_even_beyond_the_capacity() -> None:
    admission = Admission(4)
    admission.resume(5)
    assert (admission.occupied, admission.room()) == (5, 0)


def test_more_cannot_leave_than_are_there() -> None:
    with pytest.raises(ContractViolation, match="3 attempts leave, but 2"):
        admitted(2).leave(3)


def test_versions_never_go_backwards() -> None:
    admission = Admission(4)
    admission.commit(3)
    with pytest.raises(ContractViolation, match="version 2 became visible after version 3"):
        admission.commit(2)
