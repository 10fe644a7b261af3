"""Rewards of single tokens and turns, for ``--token-advantages gae`` (process rewards, turn rewards)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.types import Branch, Float32, Group


class RewardPerToken:
    """``--advantage-estimator token_rewards``: what each token earned, before a critic makes advantages of it."""

    def __init__(self, arguments: AlgorithmArguments) -> None:
        pass

    def __call__(self, groups: Sequence[Group]) -> Float32:
        samples = [sample for group in groups for sample in group.samples]
        of_branches = [
            rewards_of_tokens(branch, sample.reward or 0.0) for sample in samples for branch in sample.branches
        ]
        return np.concatenate(of_branches)


def rewards_of_tokens(branch: Branch, reward: float) -> Float32:
    """float32 [T]: the branch's token rewards, and ``reward`` on top at the last token that carries loss."""
    rewards = np.zeros(len(branch.tokens), np.float32) if branch.token_rewards is None else branch.token_rewards.copy()
    rewards[np.flatnonzero(branch.loss_mask)[-1]] += reward
    return rewards
