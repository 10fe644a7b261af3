"""Advantages of tokens and means over sequences, worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from miles_async.algorithms.objective import make_objective
from miles_async.algorithms.sequences import discounted_to_go, sequence_of_token, sum_per_sequence, sum_to_go
from miles_async.arguments.algorithm import AlgorithmArguments
from tests.fakes.token_batches import token_batch

IN_REWARD = AlgorithmArguments(token_advantages="kl_in_reward", kl_coef=0.5)


def test_a_token_pays_for_itself_and_the_tokens_after_it() -> None:
    """Two sequences; in the first, one token carries no loss and costs nothing."""
    batch = token_batch(
        old=[-1.0, -1.0, -1.0, -2.0],
        ref_logprobs=[-3.0, -9.0, 0.0, -1.0],
        advantages=[1.0, 0.0, 1.0, -1.0],
        mask=[1.0, 0.0, 1.0, 1.0],
        lengths=[3, 1],
    )
    # log π − log π_ref: 2, (8), −1; −1
    assert make_objective(IN_REWARD).advantages(batch).tolist() == [1.0 - 0.5 * (2 - 1), 0.0, 1.0 + 0.5, -1.0 + 0.5]


def test_the_kl_in_the_reward_asks_for_both_models_logprobs() -> None:
    assert make_objective(IN_REWARD).needs == {"old_logprobs", "ref_logprobs"}


GAE = AlgorithmArguments(token_advantages="gae", gamma=0.5, lambd=0.5)


def test_gae_goes_from_loss_token_to_loss_token() -> None:
    """Two sequences; in the first, a tool wrote the third token, whose value nobody asks for."""
    batch = token_batch(
        old=[0.0] * 5,
        advantages=[8.0, 8.0, 0.0, 8.0, -1.0],
        mask=[1.0, 1.0, 0.0, 1.0, 1.0],
        lengths=[4, 1],
    ).with_computed("values", torch.tensor([1.0, 2.0, 99.0, 4.0, 3.0]))
    # δ: 0.5 · 2 - 1, 0.5 · 4 - 2, 8 - 4; -1 - 3
    expected = [0 + 0.25 * (0 + 0.25 * 4), 0 + 0.25 * 4, 0.0, 4.0, -4.0]
    objective = make_objective(GAE)
    assert objective.advantages(batch).tolist() == expected
    assert objective.returns(batch).tolist() == [1.25, 3.0, 0.0, 8.0, -1.0]


def test_gae_takes_the_rewards_of_tokens_where_they_are() -> None:
    """Two turns of two tokens with a tool's between them; each turn's last token was rewarded."""
    batch = token_batch(
        old=[0.0] * 5, advantages=[0.0, 2.0, 0.0, 0.0, 6.0], mask=[1.0, 1.0, 0.0, 1.0, 1.0], per_token=True
    ).with_computed("values", torch.tensor([1.0, 2.0, 99.0, 2.0, 4.0]))
    # δ: 0.5 · 2 - 1, 2 + 0.5 · 2 - 2, 0.5 · 4 - 2, 6 - 4
    expected = [0.25 * (1 + 0.25 * 0.25 * 2), 1 + 0.25 * 0.25 * 2, 0.0, 0.25 * 2, 2.0]
    assert make_objective(GAE).advantages(batch).tolist() == expected
    of_sample = dataclasses.replace(batch, per_token=False)
    assert make_objective(GAE).advantages(of_sample).tolist() != expected


def test_gae_of_nothing_and_of_values_that_are_right() -> None:
    empty = token_batch(old=[0.0, 0.0], advantages=[0.0, 0.0], mask=[0.0, 0.0])
    assert make_objective(GAE).advantages(empty.with_computed("values", torch.ones(2))).tolist() == [0.0, 0.0]
    right = token_batch(old=[0.0] * 3, advantages=[4.0] * 3).with_computed("values", torch.tensor([1.0, 2.0, 4.0]))
    assert make_objective(GAE).advantages(right).tolist() == [0.0] * 3


def test_gae_of_a_long_sequence_is_the_recursion_s() -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(5000, generator=draw, dtype=torch.float64)
    found = discounted_to_go(values, torch.zeros(5000, dtype=torch.int64), torch.full_like(values, 0.999))
    later = 0.0
    for place in reversed(range(5000)):
        later = float(values[place]) + 0.999 * later
        assert float(found[place]) == pytest.approx(later, rel=1e-9)


def test_gae_needs_a_critic_and_with_a_kl_both_models() -> None:
    assert make_objective(GAE).needs_of_transforms == {"values"}
    with_kl = dataclasses.replace(GAE, kl_coef=0.1)
    assert make_objective(with_kl).needs_of_transforms == {"values", "old_logprobs", "ref_logprobs"}


def test_without_token_advantages_each_token_has_its_sample_s() -> None:
    batch = token_batch(old=[0.0, 0.0], advantages=[2.0, 2.0])
    assert make_objective(AlgorithmArguments()).advantages(batch) is batch.advantages


def test_sums_keep_to_their_sequences() -> None:
    offsets = torch.tensor([0, 2, 2, 5])  # the second is empty
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert sequence_of_token(offsets).tolist() == [0, 0, 2, 2, 2]
    assert sum_per_sequence(values, offsets).tolist() == [3, 0, 12]
    assert sum_to_go(values, offsets).tolist() == [3, 2, 12, 9, 5]


def test_a_long_sum_to_go_is_exact_where_float32_would_not_be() -> None:
    values = torch.full((200_000,), 0.1)
    found = sum_to_go(values, torch.tensor([0, 100_000, 200_000]))
    assert found[-1].item() == pytest.approx(0.1)
    assert found[100_000].item() == pytest.approx(10_000, rel=1e-6)


def test_mean_over_sequences_weighs_long_and_short_ones_alike() -> None:
    """A sequence without loss is none."""
    arguments = AlgorithmArguments(loss_aggregation="sequence_mean")
    batch = token_batch(
        old=[0.0] * 5, advantages=[3.0, 1.0, 0.0, 4.0, 0.0], mask=[1.0, 1.0, 0.0, 1.0, 0.0], lengths=[3, 1, 1]
    )
    logprobs = torch.zeros(5, requires_grad=True)
    sums = make_objective(arguments)(logprobs, batch)
    sums.loss.backward()
    assert sums.loss.item() == -((3 + 1) / 2 + 4)
    assert sums.count == 2
    assert logprobs.grad.tolist() == [-1.5, -0.5, 0, -4, 0]
    assert sums.metrics["policy_loss"] == -8  # metrics are per token, whatever the loss is a mean of
