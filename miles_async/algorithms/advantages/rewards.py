"""Rewards as numbers to compute advantages from."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from miles_async.errors import RewardError
from miles_async.types import Float32, Group, Rewarded, RewardParts, Sample, TokenRewards, UInt8

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

LARGEST_REWARD = 1e12  # float32 ends at 3e38, and a gradient norm squares the product of advantages and tokens


def check_reward(reward: float) -> float:
    """Return the reward if it can be trained on. Raises RewardError, which fails the attempt alone."""
    try:
        number = float(reward)  # a boolean, or NumPy's number, which checkpoints would give back as something else
    except Exception as error:  # a field that user code filled with anything
        raise RewardError(f"reward {reprlib.repr(reward)}: expected a number") from error
    if not abs(number) <= LARGEST_REWARD:  # nor is NaN
        raise RewardError(
            f"reward {number:g}: expected a finite number of at most {LARGEST_REWARD:g} in size; advantages are float32"
        )
    return number


def with_reward(sample: Sample, given: Rewarded) -> Sample:
    """Set the sample's reward; add rewards of tokens to its own, and parts to its metrics. Raises RewardError for
    unusable numbers.
    """
    if isinstance(given, RewardParts):
        parts = {name: check_reward(part) for name, part in given.parts.items()}
        metadata = {**sample.metadata, "metrics": {**sample.metadata.get("metrics", {}), **parts}}
        return msgspec.structs.replace(sample, reward=check_reward(given.reward), metadata=metadata)
    if not isinstance(given, TokenRewards):
        return msgspec.structs.replace(sample, reward=check_reward(given))
    if len(given.tokens) != len(sample.branches):
        raise RewardError(
            f"token rewards: expected an array for each of {len(sample.branches)} branches, found {len(given.tokens)}"
        )
    first, *more = (
        _summed(branch.token_rewards, of_branch, branch.loss_mask)
        for branch, of_branch in zip(sample.branches, given.tokens, strict=True)
    )
    return msgspec.structs.replace(
        sample,
        reward=check_reward(given.reward),
        token_rewards=first,
        more_branches=tuple(
            msgspec.structs.replace(branch, token_rewards=of_branch)
            for branch, of_branch in zip(sample.more_branches, more, strict=True)
        ),
    )


def with_rewards(samples: Sequence[Sample], given: Sequence[Rewarded]) -> list[Sample]:
    """Set the reward of each sample, as :func:`with_reward` does."""
    return [with_reward(sample, reward) for sample, reward in zip(samples, given, strict=True)]


def _summed(rewards: Float32 | None, more: npt.ArrayLike, loss_mask: UInt8) -> Float32:
    found = np.array(more, np.float32)  # a copy: a reward may use its array again
    if found.shape != loss_mask.shape:
        raise RewardError(f"token rewards: expected one per token, shape {loss_mask.shape}, found {found.shape}")
    if found[loss_mask == 0].any():
        raise RewardError(
            "token rewards: expected 0 at tokens that carry no loss (prompt, tools, turns of an earlier branch), found "
            f"another at token {int(np.flatnonzero((found != 0) & (loss_mask == 0))[0])}"
        )
    total = found if rewards is None else rewards + found
    check_reward(float(np.abs(total).max(initial=0.0)))
    return total


def rewards_of(groups: Sequence[Group]) -> Float32:
    """float32 [S]: rewards of all groups' samples in order. The groups must be finished."""
    rewards = [sample.reward for group in groups for sample in group.samples]
    assert None not in rewards, "a group reaches the buffer only when all its samples are rewarded"
    return np.array(rewards, dtype=np.float32)


def sizes_of(groups: Sequence[Group]) -> Int64:
    """int64 [G], samples of each group."""
    return np.array([len(group.samples) for group in groups], dtype=np.int64)


def centered(rewards: Float32, sizes: Int64) -> Float64:
    """float64 [S]: rewards minus their group's mean; exactly 0 in a group whose rewards are equal.

    Args:
        rewards: float32 [S], groups one after another.
        sizes: int64 [G], at least 1 each, sums to S.
    """
    assert sizes.sum() == len(rewards), (sizes, rewards.shape)
    assert (sizes >= 1).all(), sizes
    if len(rewards) == 0:
        return np.zeros(0)
    starts = np.cumsum(sizes) - sizes
    exact = rewards.astype(np.float64)
    # Sums of equal float32 numbers are exact in float64, so their mean is exact.
    means = np.add.reduceat(exact, starts) / sizes
    result: Float64 = exact - np.repeat(means, sizes)
    return result
