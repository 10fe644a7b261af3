"""The predicate and the two knobs.

# covers: C1, C4, O1, O4, P2, P3
"""

from __future__ import annotations

import pytest

from miles_async.arguments.rollout import RolloutArguments
from miles_async.arguments.staleness import StalenessArguments
from miles_async.errors import ConfigurationError, ContractViolation, VersionUnknownError
from miles_async.staleness.policy import StalenessPolicy, age, check_ages, is_stale


@pytest.mark.parametrize(
    ("oldest", "target", "bound", "expected"),
    [
        pytest.param(5, 5, 2, False, id="fresh"),
        pytest.param(3, 5, 2, False, id="exactly at the bound is fresh"),
        pytest.param(2, 5, 2, True, id="one above the bound"),
        pytest.param(5, 5, 0, False, id="on-policy"),
        pytest.param(4, 5, 0, True, id="on-policy, one old"),
        pytest.param(0, 99, None, False, id="no bound"),
    ],
)
def test_is_stale(oldest: int, target: int, bound: int | None, expected: bool) -> None:
    assert is_stale(oldest, target, bound) is expected


@pytest.mark.parametrize("bound", [0, 2, None])
@pytest.mark.parametrize(("oldest", "target"), [(-1, 5), (5, -1)])
def test_unknown_version_is_never_fresh(oldest: int, target: int, bound: int | None) -> None:
    with pytest.raises(VersionUnknownError):
        is_stale(oldest, target, bound)


def test_version_from_the_future_is_a_bug() -> None:
    with pytest.raises(ContractViolation, match="sampled by version 6, but the optimizer steps from version 5"):
        age(6, 5)


def test_run_time_check_names_the_samples_that_are_too_old() -> None:
    check_ages([3, 4, 5], target_version=5, bound=2)
    check_ages([0], target_version=5, bound=None)
    with pytest.raises(ContractViolation, match=r"--max-weight-staleness 1 .* \{0: 2, 2: 5\}"):
        check_ages([3, 4, 0], target_version=5, bound=1)


@pytest.mark.parametrize(
    ("arguments", "bound", "capacity"),
    [
        (StalenessArguments(), None, 3 * 8),
        (StalenessArguments(max_weight_staleness=2), 2, 3 * 8),
        (StalenessArguments(max_weight_staleness=2, max_rollout_lead=1), 2, 8),
        (StalenessArguments(max_weight_staleness=1, max_rollout_lead=5), 1, 2 * 8),
        (StalenessArguments(max_rollout_lead=5), None, 5 * 8),
        (StalenessArguments(on_policy=True), 0, 8),
    ],
)
def test_lead_is_capped_by_the_bound(arguments: StalenessArguments, bound: int | None, capacity: int) -> None:
    policy = StalenessPolicy.from_arguments(arguments, RolloutArguments(rollout_batch_size=8))
    assert (policy.bound, policy.capacity) == (bound, capacity)


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ({"bound": -1}, "--max-weight-staleness"),
        ({"lead_batches": 0}, "--max-rollout-lead"),
        ({"batch_size": 0}, "--rollout-batch-size"),
        ({"action": "ignore"}, "--stale-group-action"),
        ({"order": "random"}, "--batch-order"),
    ],
)
def test_settings_that_could_never_fill_a_batch_are_refused(wrong: dict[str, object], flag: str) -> None:
    fields = {"bound": 2, "lead_batches": 3, "batch_size": 8, "action": "recycle", **wrong}
    with pytest.raises(ConfigurationError, match=flag):
        StalenessPolicy(**fields)  # type: ignore[arg-type]
