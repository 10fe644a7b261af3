"""The cut.

# covers: C1, C3, C7, R7, R9, A11
"""

from __future__ import annotations

import msgspec
import pytest

from miles_async.errors import ContractViolation, VersionUnknownError
from miles_async.rollout.group_filters import zero_variance
from miles_async.staleness.buffer import StalenessBuffer, reward_variance
from miles_async.types import Group
from tests.property.builders import make_group


def ids(cut: tuple[tuple[Group, ...], tuple[Group, ...], object]) -> tuple[list[int], list[int]]:
    groups, stale, _ = cut
    return [g.attempt.attempt_id for g in groups], [g.attempt.attempt_id for g in stale]


def filled(versions: dict[int, int], *, batch_size: int = 2, bound: int | None = 1) -> StalenessBuffer:
    buffer = StalenessBuffer(batch_size, bound)
    for attempt_id, version in versions.items():
        buffer.put(make_group(attempt_id, [[version]]))
    return buffer


def test_oldest_admission_first_whatever_the_order_of_arrival() -> None:
    buffer = filled({3: 5, 0: 5, 2: 5, 1: 5})
    assert ids(buffer.cut(5)) == ([0, 1], [])
    assert ids(buffer.cut(5)) == ([2, 3], [])


def test_nothing_is_cut_before_a_batch_is_full() -> None:
    """A straggler holds up nobody: the groups behind it make the batch."""
    buffer = filled({1: 5})
    assert ids(buffer.cut(5)) == ([], [])
    buffer.put(make_group(2, [[5]]))
    assert ids(buffer.cut(5)) == ([1, 2], [])


def test_freshness_is_judged_for_the_version_the_optimizer_will_step_from() -> None:
    """Groups that are fresh while version 5 trains are too old for the batch that is prepared for version 6."""
    versions = {0: 4, 1: 4, 2: 5, 3: 5}
    assert ids(filled(versions).cut(5)) == ([0, 1], [])
    assert ids(filled(versions).cut(6)) == ([2, 3], [0, 1])


def test_stale_groups_leave_even_if_no_batch_is_full() -> None:
    """Or their prompts would not be replaced, and the batch might never fill."""
    buffer = filled({0: 3, 1: 5})
    assert ids(buffer.cut(5)) == ([], [0])
    assert len(buffer) == 1


def test_without_a_bound_nothing_is_swept() -> None:
    assert ids(filled({0: 0, 1: 90}, bound=None).cut(99)) == ([0, 1], [])


def test_mixed_group_is_as_old_as_its_oldest_token() -> None:
    buffer = StalenessBuffer(1, 1)
    buffer.put(make_group(0, [[5, 5], [3, 5]]))
    assert ids(buffer.cut(5)) == ([], [0])


def test_waiting_groups_are_listed_in_order() -> None:
    buffer = filled({2: 1, 0: 2, 1: 1})
    assert [group.attempt.attempt_id for group in buffer] == [0, 1, 2]


def test_same_attempt_twice_is_refused() -> None:
    with pytest.raises(ContractViolation, match="attempt 0 is in the buffer already"):
        filled({0: 1}).put(make_group(0, [[1]]))


def test_empty_group_is_refused() -> None:
    with pytest.raises(ContractViolation, match="the group of attempt 0 is empty"):
        StalenessBuffer(1, 1).put(msgspec.structs.replace(make_group(0), samples=()))


def test_group_of_unknown_version_is_refused() -> None:
    with pytest.raises(VersionUnknownError, match="found -1"):
        StalenessBuffer(1, None).put(msgspec.structs.replace(make_group(0), oldest_version=-1))


def test_swept_groups_leave_no_trace_behind() -> None:
    """A run whose batches never fill must not grow."""
    buffer = StalenessBuffer(4, 0)
    for version in range(1000):
        buffer.put(make_group(version, [[version]]))
        buffer.cut(version + 1)
    assert len(buffer) == 0
    assert len(buffer._order) < 10
    assert not buffer._by_version


def test_completion_order_takes_groups_as_they_came() -> None:
    buffer = StalenessBuffer(2, 1, order="completion")
    for attempt_id in (3, 0, 2, 1):
        buffer.put(make_group(attempt_id, [[5]]))
    assert ids(buffer.cut(5)) == ([3, 0], [])
    assert ids(buffer.cut(5)) == ([2, 1], [])


def test_groups_whose_rewards_vary_most_go_first() -> None:
    """Ties go by admission."""
    buffer = StalenessBuffer(2, 1, order="reward_variance")
    for attempt_id, rewards in {4: [0, 0, 0], 3: [0, 0.5, 0.5], 2: [1, 1, 1], 1: [1, 0, 1], 0: [0, 0, 1]}.items():
        buffer.put(make_group(attempt_id, [[5]] * 3, rewards))
    assert ids(buffer.cut(5)) == ([0, 1], [])
    assert ids(buffer.cut(5)) == ([3, 2], [])


def test_the_variance_of_rewards_is_exact() -> None:
    """0.1 has no exact mean in floating point: equal rewards are equal all the same."""
    assert reward_variance(make_group(0, [[5]] * 3, [0.1] * 3)) == 0
    assert reward_variance(make_group(0, [[5]] * 4, [0, 0, 1, 1])) == 0.25
    assert reward_variance(make_group(0, [[5]], [7])) == 0


def test_groups_whose_rewards_do_not_vary_wait_until_they_are_too_old() -> None:
    """C1, C3: they are neither trained beyond the bound nor kept."""
    buffer = StalenessBuffer(2, 2, order="reward_variance")
    buffer.put(make_group(0, [[0], [0]], [1, 1]))
    for version in range(3):
        for attempt_id in (2 * version + 1, 2 * version + 2):
            buffer.put(make_group(attempt_id, [[version], [version]], [0, 1]))
        assert ids(buffer.cut(version)) == ([2 * version + 1, 2 * version + 2], [])
    assert ids(buffer.cut(3)) == ([], [0])


@pytest.mark.parametrize("order", ["oldest_first", "completion", "reward_variance"])
def test_a_group_goes_on_with_its_fresh_samples_while_enough_remain(order: str) -> None:
    buffer = StalenessBuffer(2, 1, order=order, min_samples=2)
    buffer.put(msgspec.structs.replace(make_group(0, [[5], [2], [5, 4]]), stopped=3, aborted=1))
    buffer.put(make_group(1, [[5], [2], [2]]))  # one fresh sample is not enough
    buffer.put(make_group(2, [[5], [5], [5]]))
    cut = buffer.cut(5)
    assert ids(cut) == ([0, 2], [1])
    groups, _, [trimmed] = cut
    assert [len(group.samples) for group in groups] == [2, 3]
    assert (trimmed.group, trimmed.left_out) == (groups[0], 1)
    assert groups[0].oldest_version == 4
    assert (groups[0].stopped, groups[0].aborted) == (3, 1)  # metrics count them


def test_a_group_whose_rest_a_filter_refuses_is_stale() -> None:
    """Both fresh samples of the first are wrong: there is nothing left to compare."""
    buffer = StalenessBuffer(1, 1, min_samples=2, group_filter=zero_variance)
    buffer.put(make_group(0, [[5], [2], [5]], rewards=[0, 1, 0]))
    buffer.put(make_group(1, [[5], [2], [5]], rewards=[0, 1, 1]))
    assert ids(buffer.cut(5)) == ([1], [0])


def test_a_group_may_lose_samples_at_several_cuts() -> None:
    buffer = StalenessBuffer(2, 1, min_samples=1)
    buffer.put(make_group(0, [[3], [4], [5]]))
    sizes = []
    for target in range(4, 7):
        (trimmed,) = buffer.cut(target)[2] or (None,)
        sizes.append(trimmed and len(trimmed.group.samples))
    assert sizes == [None, 2, 1]
    assert buffer.count_stale(6) == 0
    assert buffer.count_stale(7) == 1
    assert ids(buffer.cut(7)) == ([], [0])
