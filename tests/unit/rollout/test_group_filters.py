"""Group filters and their reasons. tests/unit/rollout/test_dispatcher.py tests that filtered groups are replaced.

# covers: C3, M10, R10
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence

import pytest

from miles_async.api import GroupFilter
from miles_async.arguments import RewardArguments
from miles_async.arguments.rewards import FILTERS, NUMBERED_FILTERS
from miles_async.errors import ConfigurationError
from miles_async.rollout import group_filters
from miles_async.staleness.versions import group_of
from miles_async.types import Group
from tests.property.builders import make_attempt, make_sample


def group(*rewards: float, tokens: int = 3, finish_reasons: Sequence[str] = ()) -> Group:
    reasons = [*finish_reasons, *["stop"] * (len(rewards) - len(finish_reasons))]
    samples = [
        make_sample([0] * tokens, reward=reward, finish_reason=reason)
        for reward, reason in zip(rewards, reasons, strict=True)
    ]
    return group_of(make_attempt(), samples)


def reason(words: str, of_group: Group) -> str | None:
    group_filter = group_filters.group_filter(RewardArguments(group_filter=tuple(words.split())))
    assert isinstance(group_filter, GroupFilter)
    return group_filter(of_group)


def test_names_are_those_that_the_flag_may_say():
    assert set(group_filters.GROUP_FILTERS) == set(FILTERS)
    assert set(group_filters.NUMBERED_GROUP_FILTERS) == set(NUMBERED_FILTERS)


@pytest.mark.parametrize(
    ("words", "of_group", "expected"),
    [
        ("zero_variance", group(1.0, 0.0, 1.0), None),
        ("zero_variance", group(0.0, 0.0), "zero_variance: all rewards 0"),
        ("zero_variance", group(1.0, 1.0), "zero_variance: all rewards 1"),
        ("zero_variance", group(0.3, 0.1 + 0.2), "zero_variance"),
        ("aborted", group(0.0, 1.0, finish_reasons=["abort"]), "aborted"),
        ("aborted", group(0.0, 1.0, finish_reasons=["length"]), None),
        ("max_length:3", group(0.0, 1.0, tokens=3), None),
        ("max_length:3", group(0.0, 1.0, tokens=4), "max_length:3"),
        ("max_length:3", group_of(make_attempt(), [make_sample([0], more_branches=[[0] * 4])]), "max_length:3"),
        ("truncated:0.5", group(0.0, 1.0, finish_reasons=["length"]), None),
        ("truncated:0.5", group(0.0, 1.0, finish_reasons=["length", "length"]), "truncated:0.5"),
        ("truncated:0", group(0.0, 1.0, finish_reasons=["length"]), "truncated:0"),
        ("max_length:3 zero_variance", group(1.0, 1.0, tokens=4), "max_length:3"),  # the first that has a reason
        ("max_length:9 zero_variance", group(1.0, 1.0, tokens=4), "zero_variance: all rewards 1"),
    ],
)
def test_reasons(words: str, of_group: Group, expected: str | None):
    assert reason(words, of_group) == expected


def test_without_filters_there_is_none():
    assert group_filters.group_filter(RewardArguments()) is None


@pytest.fixture
def own_filters() -> Iterator[types.ModuleType]:
    module = types.ModuleType("own_filters")
    source = (
        "asked = []\ndef odd(group):\n    asked.append(group)\n    return 'odd' if len(group.samples) % 2 else None"
    )
    exec(source, module.__dict__)
    sys.modules["own_filters"] = module
    yield module
    del sys.modules["own_filters"]


def test_the_users_own_filter_is_asked_after_the_others(own_filters: types.ModuleType):
    group_filter = group_filters.group_filter(
        RewardArguments(group_filter=("zero_variance",), group_filter_path="own_filters:odd")
    )
    assert group_filter is not None
    assert group_filter(group(1.0, 1.0, 1.0)) == "zero_variance: all rewards 1"
    assert not own_filters.asked
    assert group_filter(group(1.0, 0.0, 1.0)) == "odd"
    assert group_filter(group(1.0, 0.0)) is None


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("zero_varianc", "--group-filter: expected one of zero_variance, .*did you mean zero_variance?"),
        ("max_length", "--group-filter max_length: expected a number after it"),
        ("truncated:half", "expected a number after truncated:, found 'half'"),
        ("aborted:1", "aborted takes no number"),
    ],
)
def test_unusable_filters_are_refused(word: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        group_filters.group_filter(RewardArguments(group_filter=(word,)))
