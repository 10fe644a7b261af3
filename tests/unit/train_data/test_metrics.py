"""Metrics of a batch.

# covers: M3, M18, O5
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec import structs

from miles_async.staleness.versions import group_of
from miles_async.train_data.batch import BranchTable, tabulate
from miles_async.train_data.metrics import age_histogram, batch_metrics, generation_metrics, length_bias
from miles_async.types import NO_VERSION, Group
from tests.property.builders import make_attempt, make_sample


def table_of(groups: Sequence[Group]) -> BranchTable:
    return tabulate(groups, np.zeros(sum(len(group.samples) for group in groups), np.float32))


@pytest.fixture
def groups() -> list[Group]:
    """Three groups of two, cut for version 6: all wrong, all right, mixed."""
    return [
        group_of(make_attempt(0), [make_sample([6, 6], reward=0.0), make_sample([5, 6], reward=0.0)]),
        group_of(make_attempt(1), [make_sample([6], reward=1.0), make_sample([4, 4, 4], reward=1.0)]),
        group_of(
            make_attempt(2),
            [make_sample([6, NO_VERSION, 6], reward=0.0), make_sample([5], reward=1.0, finish_reason="length")],
        ),
    ]


def test_metrics(groups: list[Group]) -> None:
    versions = [6, 6, 5, 6, 6, 4, 4, 4, 6, 6, 5]
    assert batch_metrics(groups, table_of(groups), target_version=6) == pytest.approx(
        {
            "reward/mean": 0.5,
            "response_length/mean": 2.0,
            "response_length/max": 3.0,
            "truncated_ratio": 1 / 6,
            "weight_version/min": 4.0,
            "weight_version/max": 6.0,
            "weight_version/mean": np.mean(versions),
            "weight_version/std": np.std(versions),
            "mixed_version_ratio": 1 / 6,
            "age/mean": (0 + 1 + 0 + 2 + 0 + 1) / 6,
            "age/max": 2.0,
            "zero_std/all_zero_percentage": 100 / 3,
            "zero_std/all_one_percentage": 100 / 3,
            "rollout/finish_reason/stop": 5 / 6,
            "rollout/finish_reason/length": 1 / 6,
            "rollout/finish_reason/abort": 0.0,
            "rollout/branches/mean": 1.0,
            "rollout/aborted_samples": 0.0,
        }
    )


def test_groups_that_are_all_right_are_not_taken_for_those_that_are_all_wrong(groups: list[Group]) -> None:
    found = batch_metrics(groups[1:], table_of(groups[1:]), target_version=6)
    assert found["zero_std/all_zero_percentage"] == 0.0
    assert found["zero_std/all_one_percentage"] == 50.0


def test_samples_that_groups_go_on_without_are_counted(groups: list[Group]) -> None:
    # covers: C5, C7
    groups[1] = structs.replace(groups[1], aborted=2)
    assert batch_metrics(groups, table_of(groups), target_version=6)["rollout/aborted_samples"] == 2.0


def test_notes_of_generation_are_logged_and_those_that_are_no_numbers_skipped() -> None:
    # covers: M13, M18
    notes = [
        {"turns": 2, "chunks": 3, "prompt_tokens": 10, "cached_tokens": 4, "metrics": {"tool_errors": 1, "odd": "x"}},
        {"turns": 4, "chunks": 4, "prompt_tokens": 30, "cached_tokens": 26, "metrics": {"tool_errors": 2}},
        {"turns": "many", "metrics": 7},
        {},
    ]
    samples = [structs.replace(make_sample([0]), metadata=note) for note in notes]
    samples[0] = structs.replace(samples[0], more_branches=make_sample([0], more_branches=[[0]]).branches)
    found = generation_metrics(samples)
    assert {name: value for name, value in found.items() if "finish_reason" not in name} == {
        "rollout/branches/mean": 1.5,
        "rollout/turns/mean": 3.0,
        "rollout/turns/max": 4.0,
        "rollout/chunks/mean": 3.5,
        "rollout/prefix_cache_hit_rate": 0.75,
        "rollout/tool_errors/mean": 0.75,
        "rollout/odd/mean": 0.0,
    }


def test_branches_count_for_ages_and_not_twice_for_rewards() -> None:
    samples = [make_sample([6], reward=1.0, more_branches=[[3], [6]]), make_sample([6], reward=0.0)]
    groups = [group_of(make_attempt(), samples)]
    found = batch_metrics(groups, table_of(groups), target_version=6)
    assert (found["reward/mean"], found["age/max"], found["age/mean"]) == (0.5, 3.0, 1.5)
    assert found["mixed_version_ratio"] == 0.5


def test_a_sample_is_as_long_as_its_longest_branch() -> None:
    groups = [group_of(make_attempt(), [make_sample([6], more_branches=[[6] * 5]), make_sample([6] * 3)])]
    found = batch_metrics(groups, table_of(groups), target_version=6)
    assert (found["response_length/mean"], found["response_length/max"]) == (4.0, 5.0)


def test_metrics_are_plain_floats(groups: list[Group]) -> None:
    assert {type(value) for value in batch_metrics(groups, table_of(groups), 6).values()} == {float}


def test_age_histogram_counts_samples() -> None:
    versions = [[6], [5], [6], [6, 6], [6], [5]]
    more_branches = {3: [[4]]}
    samples = [make_sample(own, more_branches=more_branches.get(i, [])) for i, own in enumerate(versions)]
    groups = [group_of(make_attempt(), samples)]
    histogram = age_histogram(table_of(groups), target_version=6)
    assert histogram == {0: 3, 1: 2, 2: 1}
    assert {type(key) for key in histogram} == {int}


def test_samples_that_were_stopped_would_have_been_at_least_as_long_as_the_longest(groups: list[Group]) -> None:
    assert length_bias(groups) == {}
    cut_short = [groups[0], structs.replace(groups[1], stopped=2), groups[2]]  # lengths 2, 2; 1, 3; 3, 1
    assert length_bias(cut_short) == {
        "rollout/stopped_samples": 2.0,
        "rollout/length_bias": pytest.approx((12 / 6) / ((12 + 2 * 3) / 8)),
    }
    assert length_bias(cut_short).items() <= batch_metrics(cut_short, table_of(cut_short), target_version=6).items()
