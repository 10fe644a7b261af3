"""The predicate against counting on fingers, and the buffer against a list.

# covers: C1, O1
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miles_async.staleness.buffer import StalenessBuffer
from miles_async.staleness.policy import is_stale
from tests.property.builders import make_group

BOUNDS = st.none() | st.integers(0, 4)


def trainings_between(oldest: int, target: int) -> int:
    """Count the optimizer's steps since the weights ``oldest``, one by one."""
    steps = 0
    while oldest < target:
        oldest += 1
        steps += 1
    return steps


@given(st.integers(0, 30), st.integers(0, 30), BOUNDS)
def test_is_stale_counts_trainings(oldest: int, more: int, bound: int | None) -> None:
    expected = False if bound is None else trainings_between(oldest, oldest + more) not in range(bound + 1)
    assert is_stale(oldest, oldest + more, bound) is expected


@given(
    st.integers(1, 4),
    BOUNDS,
    st.lists(st.tuples(st.permutations(range(6)), st.lists(st.integers(0, 3), min_size=6, max_size=6)), max_size=5),
)
def test_cut_takes_the_oldest_fresh_groups_and_sweeps_exactly_the_stale(
    batch_size: int, bound: int | None, rounds: list[tuple[list[int], list[int]]]
) -> None:
    """Per round: six groups arrive in any order, up to three versions old, and one cut follows."""
    buffer = StalenessBuffer(batch_size, bound)
    model: dict[int, int] = {}  # attempt_id → oldest version
    for target, (order, ages) in enumerate(rounds):
        for position in order:
            attempt_id, version = 6 * target + position, max(0, target - ages[position])
            buffer.put(make_group(attempt_id, [[target, version]]))
            model[attempt_id] = version
        cut, swept, _ = buffer.cut(target)
        stale = sorted(i for i, version in model.items() if bound is not None and target - version > bound)
        fresh = sorted(model.keys() - set(stale))
        taken = fresh[:batch_size] if len(fresh) >= batch_size else []
        assert [group.attempt.attempt_id for group in swept] == stale
        assert [group.attempt.attempt_id for group in cut] == taken
        for attempt_id in stale + taken:
            del model[attempt_id]
        assert [group.attempt.attempt_id for group in buffer] == sorted(model)
        assert len(buffer) == len(model)
