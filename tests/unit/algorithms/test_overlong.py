"""DAPO's soft overlong punishment against eq. 13 of its paper."""

from __future__ import annotations

import numpy as np
import pytest

from miles_async.algorithms.advantages.overlong import overlong_penalty, with_length_penalty
from miles_async.algorithms.registry import advantage_estimator
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.staleness.versions import group_of
from tests.property.builders import make_attempt, make_sample


def reference(length: int, longest: int, buffer: int) -> float:
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


@pytest.mark.parametrize(("longest", "buffer"), [(100, 20), (64, 64), (7, 1)])
def test_penalty_equals_the_paper_s(longest: int, buffer: int) -> None:
    lengths = np.arange(longest + 5)
    expected = [reference(int(length), longest, buffer) for length in lengths]
    np.testing.assert_allclose(overlong_penalty(lengths, longest, buffer), expected, rtol=1e-12)


def test_advantages_see_the_shaped_reward_and_the_record_does_not() -> None:
    samples = [make_sample([0] * length, reward=1.0) for length in (4, 8, 10)]
    group = group_of(make_attempt(), samples)
    arguments = AlgorithmArguments(advantage_estimator="reinforce", overlong_buffer_len=4, overlong_penalty_factor=0.5)
    estimator = with_length_penalty(advantage_estimator(arguments), arguments, longest=10)
    lengths = [sample.response_length for sample in samples]
    expected = [1.0 + 0.5 * reference(length, 10, 4) for length in lengths]
    assert len(set(expected)) == 3
    assert estimator([group]).tolist() == pytest.approx(expected)
    assert [sample.reward for sample in group.samples] == [1.0, 1.0, 1.0]


def test_a_sample_is_as_long_as_its_longest_branch() -> None:
    samples = [make_sample([0], more_branches=[[0] * 10, [0] * 2]), make_sample([0] * 10)]
    arguments = AlgorithmArguments(advantage_estimator="reinforce", overlong_buffer_len=4)
    estimator = with_length_penalty(advantage_estimator(arguments), arguments, longest=10)
    assert estimator([group_of(make_attempt(), samples)]).tolist() == [0.0, 0.0]


def test_without_the_flag_rewards_stay() -> None:
    arguments = AlgorithmArguments()
    estimator = advantage_estimator(arguments)
    assert with_length_penalty(estimator, arguments, longest=10) is estimator
