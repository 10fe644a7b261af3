"""Estimates of an evaluation and their intervals, against textbooks, brute force and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from miles_async.evaluation.estimates import FEWEST, Z, differences, estimates, mean, per_prompt, proportion, t_quantile


def brute_force(rewards: list[float], k: int) -> float:
    """Share of the draws of k samples without replacement in which one is right."""
    draws = list(itertools.combinations(rewards, k))
    return sum(max(draw) >= 1 for draw in draws) / len(draws)


def test_pass_at_k_of_each_prompt_is_the_share_of_all_draws() -> None:
    rewards = {f"p{right}": [1.0] * right + [0.5] * (6 - right) for right in range(7)}
    found = per_prompt(rewards)
    assert [*found] == ["reward", "pass@1", "pass@2", "pass@4", "pass@6"]
    for k in (1, 2, 4, 6):
        assert found[f"pass@{k}"] == pytest.approx({name: brute_force(given, k) for name, given in rewards.items()})
    estimated = estimates(rewards)
    assert estimated["pass@4"].mean == pytest.approx(np.mean([brute_force(given, 4) for given in rewards.values()]))
    assert estimated["reward"].mean == pytest.approx(0.75)


def test_prompts_with_fewer_samples_count_where_they_have_enough() -> None:
    found = estimates({"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0]})
    assert (found["pass@1"].mean, found["pass@1"].prompts) == (0.625, 2)
    assert (found["pass@4"].mean, found["pass@4"].prompts) == (1.0, 1)


def test_a_prompt_that_lost_a_sample_adds_no_k_of_its_own() -> None:
    found = per_prompt({"a": [1.0, 0.0] * 4, "b": [1.0] * 7})
    assert [*found] == ["reward", "pass@1", "pass@2", "pass@4", "pass@8"]
    assert [*found["pass@8"]] == ["a"]


@pytest.mark.parametrize("prompts", [2, 3, 6, 7, 30])
def test_prompts_that_are_all_alike_have_the_interval_of_as_many_samples(prompts: int) -> None:
    found = proportion([0.7] * prompts)
    assert found.high - found.low > 0.2


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_one_sample_per_prompt_has_wilsons_interval(right: int, count: int, low: float, high: float) -> None:
    """Published values: the last one is of Newcombe 1998, table I."""
    found = proportion([1.0] * right + [0.0] * (count - right))
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("right", "count"), [(3, 17), (1, 5), (40, 41)])
def test_wilsons_interval_has_the_proportions_that_the_score_test_accepts(right: int, count: int) -> None:
    observed = right / count

    def rejected(chance: float) -> float:
        return abs(observed - chance) - Z * math.sqrt(chance * (1 - chance) / count)

    found = proportion([1.0] * right + [0.0] * (count - right))
    for end in (found.low, found.high):
        assert rejected(end) == pytest.approx(0, abs=1e-9)


def test_samples_of_a_prompt_that_agree_count_as_one_and_more_that_differ_narrow_the_interval() -> None:
    alike = proportion([1.0, 0.0] * 20)
    assert alike == proportion([1.0, 0.0] * 20)
    apart = proportion([0.5 + sign * 0.1 for sign in (1, -1)] * 20)
    assert apart.mean == pytest.approx(alike.mean)
    assert apart.high - apart.low < (alike.high - alike.low) / 3


@pytest.mark.parametrize(
    ("alpha", "beta", "samples", "k"), [(2, 2, 4, 2), (0.5, 0.5, 8, 1), (8, 1, 4, 1), (1, 6, 8, 4)]
)
def test_the_interval_of_pass_at_k_has_the_truth_in_19_of_20_simulated_evaluations(
    alpha: float, beta: float, samples: int, k: int
) -> None:
    random = np.random.default_rng(0)
    chances = random.beta(alpha, beta, 400_000)
    truth = float(np.mean(1 - (1 - chances) ** k))
    table = [1 - math.comb(samples - right, k) / math.comb(samples, k) for right in range(samples + 1)]
    rounds, hits = 1500, 0
    for _ in range(rounds):
        found = proportion(np.take(table, random.binomial(samples, random.beta(alpha, beta, 60))))
        hits += found.low <= truth <= found.high
    assert 0.93 <= hits / rounds <= 0.975


def test_students_intervals_are_those_of_the_textbook() -> None:
    # Student 1908, ten patients, hours of additional sleep by two drugs; R: t.test(extra ~ group, paired = TRUE)
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = differences(*({str(i): [hours] for i, hours in enumerate(drug)} for drug in (second, first)))["reward"]
    assert found.mean == pytest.approx(-1.58)
    assert (found.low, found.high) == pytest.approx((-2.459886, -0.7001142), abs=1e-3)
    table = {4: 2.77645, 9: 2.26216, 19: 2.09302, 29: 2.04523, 99: 1.98422}
    assert {n: t_quantile(n) for n in table} == pytest.approx(table, rel=1e-3)


def test_differences_are_paired_by_prompt_and_leave_out_what_one_side_lacks() -> None:
    hard = {f"p{i}": [float(i % 2), 0.0] for i in range(20)}
    better = {name: [given[0], 1.0] for name, given in hard.items()} | {"new": [1.0, 1.0]}
    found = differences(hard, better)
    assert (found["reward"].mean, found["reward"].prompts) == (0.5, 20)
    assert found["pass@1"].mean == 0.5
    assert (found["pass@2"].mean, found["pass@2"].prompts) == (0.5, 20)
    assert found["reward"].low is None  # the same on every prompt
    assert found["pass@2"].low == pytest.approx(0.5 - t_quantile(19) * math.sqrt(0.25 / 19))
    apart = differences({"a": [1.0]}, {"b": [1.0]})
    assert apart == {}


def test_few_prompts_have_no_interval_of_student() -> None:
    assert mean([0.1, 0.5, 0.7, 0.2]).low is None
    assert mean([0.1, 0.5, 0.7, 0.2, 0.3]).low is not None
    assert FEWEST == 5
