"""VCPO's baseline, against its formula with gradients by autograd, one trajectory at a time, in float64.

# covers: C12
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from miles_async.algorithms.objective import make_objective
from miles_async.algorithms.whole_batch import optimal_baseline
from miles_async.algorithms.whole_batch.optimal_baseline import optimal_baselines
from miles_async.algorithms.whole_batch.transform import Gather, Trajectories, WholeBatch
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments
from tests.fakes.token_batches import token_batch
from tests.unit.algorithms.formula_errors import unnoticed
from tests.unit.algorithms.ranks import alone, on_ranks

SEEDS = range(4)
GROUPS = (0, 0, 0, 1, 1, 1, 1, 2, 3, 3)  # of group 2 one sample is left
VOCAB = 7
HARMLESS = {
    # A factor that all weights of a group have in common cancels.
    *("trajectories.squared_norms", "of_rank.squared_norms", "whole.gather(of_rank.squared_norms)"),
    "(logs - largest.clamp(min=torch.finfo(logs.dtype).min)[groups]).exp()",
    *("logs", "torch.finfo(logs.dtype).min"),  # only the type counts; far below any logarithm
}
OPOB = make_objective(AlgorithmArguments(advantage_estimator="opob", use_rollout_logprobs=True))


class Policy(torch.nn.Module):
    """The next token by the one before, through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, 5, dtype=torch.float64)
        self.output = torch.nn.Linear(5, VOCAB, dtype=torch.float64)

    def logprobs(self, tokens: Tensor) -> Tensor:
        """[T], 0 at the first token."""
        logits = self.output(torch.tanh(self.embedding(tokens[:-1])))
        found = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        return torch.cat([found.new_zeros(1), found])


@dataclass(frozen=True)
class Trajectory:
    """One with one branch or two: tokens, mask, log-probs by the engine, each [T]."""

    branches: tuple[tuple[Tensor, Tensor, Tensor], ...]
    reward: float
    group: int
    log_weight: float
    squared_norm: float


@functools.cache
def sampled(seed: int) -> tuple[Trajectory, ...]:
    torch.manual_seed(seed)
    policy, found = Policy(), []
    for number, group in enumerate(GROUPS):
        branches = []
        for length in (2, 3 + number) if number % 3 == 0 else (2 + number,):
            tokens, mask = torch.randint(0, VOCAB, (length,)), torch.rand(length) < 0.8
            mask[0], mask[1] = False, True
            noise = 0.3 * torch.randn(length, dtype=torch.float64)
            branches.append((tokens, mask, policy.logprobs(tokens).detach() + noise))
        total = torch.stack([policy.logprobs(tokens)[mask].sum() for tokens, mask, _ in branches]).sum()
        gradients = torch.autograd.grad(total, list(policy.parameters()))
        rollout = sum(float(rollout[mask].sum()) for _, mask, rollout in branches)
        found.append(
            Trajectory(
                branches=tuple(branches),
                reward=float(torch.randint(0, 3, ())) if number != 8 else 0.0,
                group=group,
                log_weight=total.item() - rollout,
                squared_norm=sum(float(gradient.square().sum()) for gradient in gradients),
            )
        )
    return tuple(found)


def rewards_of(every: Sequence[Trajectory], group: int) -> list[float]:
    return [one.reward for one in every if one.group == group]


def deviation(rewards: Sequence[float], *, normalize: bool) -> float:
    """GRPO's divisor."""
    mean = sum(rewards) / len(rewards)
    squares = sum((reward - mean) ** 2 for reward in rewards)
    return math.sqrt(squares / max(1, len(rewards) - 1)) + 1e-4 if normalize else 1.0


def reference(every: Sequence[Trajectory], *, normalize: bool) -> list[float]:
    """(R - b*) / deviation, of each trajectory."""
    advantages = []
    for one in every:
        group = [other for other in every if other.group == one.group]
        weights = [math.exp(other.log_weight) ** 2 * other.squared_norm for other in group]
        baseline = sum(w * other.reward for w, other in zip(weights, group, strict=True)) / sum(weights)
        advantages.append((one.reward - baseline) / deviation(rewards_of(every, one.group), normalize=normalize))
    return advantages


def given(one: Trajectory, every: Sequence[Trajectory], *, normalize: bool) -> float:
    """GRPO's advantage, as the rollout side computes it."""
    rewards = rewards_of(every, one.group)
    return (one.reward - sum(rewards) / len(rewards)) / deviation(rewards, normalize=normalize)


def trajectories(every: Sequence[Trajectory], indices: Sequence[int], *, normalize: bool = True) -> Trajectories:
    chosen = [every[index] for index in indices]
    advantages = [given(one, every, normalize=normalize) for one in chosen]
    return Trajectories(
        group_ids=torch.tensor([one.group for one in chosen], dtype=torch.int64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        log_weights=torch.tensor([one.log_weight for one in chosen], dtype=torch.float64),
        squared_norms=torch.tensor([one.squared_norm for one in chosen], dtype=torch.float64),
    )


def micro_batch(every: Sequence[Trajectory], branches: Sequence[tuple[int, int]], *, normalize: bool) -> TokenBatch:
    """``branches``: (trajectory, number of its branch); none are a filler."""
    if not branches:
        filler = token_batch(old=[0.0], advantages=[0.0], mask=[0.0])
        return dataclasses.replace(filler, group_ids=torch.tensor([-1]))
    parts = [(every[index], every[index].branches[number]) for index, number in branches]
    mask = torch.cat([mask for _, (_, mask, _) in parts]).double()
    lengths = [len(tokens) for _, (tokens, _, _) in parts]
    advantages = [given(one, every, normalize=normalize) for one, (tokens, _, _) in parts for _ in tokens]
    batch = token_batch(old=[0.0] * len(mask), advantages=[0.0] * len(mask), lengths=lengths)
    return dataclasses.replace(
        batch,
        loss_mask=mask,
        advantages=torch.tensor(advantages, dtype=torch.float64) * mask,
        group_ids=torch.tensor([one.group for one, _ in parts]),
    )


def all_branches(every: Sequence[Trajectory]) -> list[tuple[int, int]]:
    return [(index, number) for index, one in enumerate(every) for number in range(len(one.branches))]


def disagreement(seed: int, *, normalize: bool) -> float:
    """The largest difference from the reference at a token that carries loss, of one rank with one micro-batch."""
    every = sampled(seed)
    batch = micro_batch(every, all_branches(every), normalize=normalize)
    mine = trajectories(every, range(len(every)), normalize=normalize)
    (found,) = OPOB.prepared([batch], WholeBatch(gather=alone, trajectories=mine))
    expected = reference(every, normalize=normalize)
    wanted = torch.cat([expected[i] * every[i].branches[number][1].double() for i, number in all_branches(every)])
    return float((found.advantages - wanted).abs().max())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [True, False])
def test_advantages_are_rewards_minus_the_baseline(seed: int, normalize: bool) -> None:
    assert disagreement(seed, normalize=normalize) < 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_no_other_baseline_gives_weighed_gradients_a_smaller_second_moment(seed: int) -> None:
    every = sampled(seed)
    mine = trajectories(every, range(len(every)))
    found = optimal_baselines(mine)

    def moment(baselines: Tensor) -> float:
        squares = (2 * mine.log_weights).exp() * mine.squared_norms
        return float((squares * (mine.advantages - baselines[mine.group_ids]).square()).sum())

    for group in set(GROUPS):
        for step in (-1e-3, 1e-3):
            moved = found.clone()
            moved[group] += step
            assert moment(moved) > moment(found)


@pytest.mark.parametrize(
    ("parts", "measured"),
    [
        ([[[0, 4], [9, 2]], [[7], [1, 3, 5, 6, 8]]], [[8, 1, 3], [0, 2, 4, 5, 6, 7, 9]]),
        ([[[]], [[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]], [[], []]], [[], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], []]),
    ],
    ids=["two", "three, two of them idle"],
)
def test_neither_ranks_nor_packing_change_advantages(parts: list[list[list[int]]], measured: list[list[int]]) -> None:
    """A rank may train what another measured: branches of a trajectory are on several."""
    every = sampled(1)

    def run(rank: int, gather: Gather) -> list[tuple[int, float]]:
        with_branches = [[(index, 0) for index in part] for part in parts[rank]]
        batches = [micro_batch(every, part, normalize=True) for part in with_branches]
        prepared = OPOB.prepared(batches, WholeBatch(gather=gather, trajectories=trajectories(every, measured[rank])))
        return [
            (index, float(batch.advantages[batch.offsets[place] + 1]))
            for batch, part in zip(prepared, with_branches, strict=True)
            for place, (index, _) in enumerate(part)
        ]

    found = dict(pair for of_rank in on_ranks(len(parts), run) for pair in of_rank)
    expected = reference(every, normalize=True)
    assert [found[index] for index in range(len(every))] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def baselines(log_weights: list[float], squared_norms: list[float], advantages: list[float]) -> list[float]:
    """b* of one group whose samples have these values."""
    found = optimal_baselines(
        Trajectories(
            group_ids=torch.zeros(len(advantages), dtype=torch.int64),
            advantages=torch.tensor(advantages, dtype=torch.float64),
            log_weights=torch.tensor(log_weights, dtype=torch.float64),
            squared_norms=torch.tensor(squared_norms, dtype=torch.float64),
        )
    )
    return found.tolist()


def test_ratios_beyond_float64_leave_the_reward_of_the_likeliest() -> None:
    assert baselines([900.0, 0.0], [1e-30, 1e30], [0.75, -0.75]) == [0.75]
    assert baselines([-900.0, -2000.0], [1.0, 1e30], [0.75, -0.75]) == [0.75]
    assert baselines([-900.0, -900.0], [1.0, 3.0], [0.75, -0.75]) == [pytest.approx(-0.375)]


def test_trajectories_without_a_gradient_have_no_say() -> None:
    assert baselines([0.0, 5.0, 0.0], [1.0, 0.0, 1.0], [1.0, -9.0, 0.5]) == [0.75]


def test_a_group_without_gradients_keeps_its_mean() -> None:
    assert baselines([0.0, 1.0], [0.0, 0.0], [0.75, -0.75]) == [0.0]


def test_an_error_of_a_thousandth_is_noticed() -> None:
    def agree() -> bool:
        every = all(disagreement(seed, normalize=normalize) < 1e-6 for seed in SEEDS for normalize in (True, False))
        return every and baselines([900.0, 0.0], [1e-30, 1e30], [0.75, -0.75]) == [0.75]

    assert set(unnoticed(optimal_baseline, agree)) == HARMLESS


def test_other_estimators_need_no_norms() -> None:
    assert not make_objective(AlgorithmArguments(use_rollout_logprobs=True)).weighs_trajectories
