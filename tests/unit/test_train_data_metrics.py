"""What is said about a batch.

# covers: M3, M18, O5
"""

from __future__ import annotations

import numpy as np
import pytest

from miles_async.staleness.versions import group_of
from miles_async.train_data.metrics import age_histogram, batch_metrics
from miles_async.types import NO_VERSION, Group
from tests.property.builders import make_attempt, make_sample


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
    assert batch_metrics(groups, target_version=6) == pytest.approx(
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
        }
    )


def test_metrics_are_plain_floats(groups: list[Group]) -> None:
    assert {type(value) for value in batch_metrics(groups, 6).values()} == {float}


def test_age_histogram_counts_samples() -> None:
    histogram = age_histogram(np.array([6, 5, 6, 4, 6, 5], dtype=np.int32), target_version=6)
    assert histogram == {0: 3, 1: 2, 2: 1}
    assert {type(key) for key in histogram} == {int}
