"""Samples as flat per-token arrays with offsets, and picking branches out of them (M2).

``weight_versions`` travels like every other per-token array, so that the loss and the C1 check see the
versions of exactly the tokens they work on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from miles_async.algorithms.advantages import rewards_of
from miles_async.errors import ContractViolation, VersionUnknownError
from miles_async.types import NO_VERSION, Float32, Group, Int32, Int64, TrainBatch, UInt8


def build_batch(groups: Sequence[Group], advantages: Float32) -> TrainBatch:
    """All branches of all samples of the groups, in order, flattened.

    Args:
        groups: at least one.
        advantages: float32, one per sample, in the same order.

    Raises:
        VersionUnknownError: a branch has no loss token, or one without a version.
        ContractViolation: a loss token has no finite log-prob or advantage; ``rollout.sample_guard`` and the guards of
            rewards let none in.
    """
    samples = [sample for group in groups for sample in group.samples]
    assert len(advantages) == len(samples) > 0, (len(advantages), len(samples))
    sample_ids = np.repeat(np.arange(len(samples), dtype=np.int64), [1 + len(s.more_branches) for s in samples])
    branches = [branch for sample in samples for branch in sample.branches]
    for branch in branches:
        lengths = {
            len(branch.tokens),
            len(branch.loss_mask),
            len(branch.rollout_logprobs),
            len(branch.weight_versions),
        }
        assert len(lengths) == 1, f"per-token arrays of a sample differ in length: {lengths}"
    offsets = np.zeros(len(branches) + 1, dtype=np.int64)
    np.cumsum([len(branch.tokens) for branch in branches], out=offsets[1:])
    loss_mask = np.concatenate([branch.loss_mask for branch in branches])
    weight_versions = np.concatenate([branch.weight_versions for branch in branches])
    rollout_logprobs = np.concatenate([branch.rollout_logprobs for branch in branches])
    no_logprob = (loss_mask != 0) & ~np.isfinite(rollout_logprobs)
    _refuse("log-prob for every loss token", np.repeat(sample_ids, np.diff(offsets))[no_logprob])
    _refuse("advantage for every sample", np.flatnonzero(~np.isfinite(advantages)))
    return TrainBatch(
        tokens=np.concatenate([branch.tokens for branch in branches]),
        offsets=offsets,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        weight_versions=weight_versions,
        oldest_versions=oldest_per_branch(weight_versions, loss_mask, offsets),
        advantages=advantages[sample_ids],
        rewards=rewards_of(groups)[sample_ids],
        sample_ids=sample_ids,
    )


def _refuse(expected: str, without: Int64) -> None:
    if len(without):
        raise ContractViolation(f"C12: expected a finite {expected}; samples {np.unique(without)} differ")


def oldest_per_branch(weight_versions: Int32, loss_mask: UInt8, offsets: Int64) -> Int32:
    """int32 [S]: per branch, the oldest version among its tokens that carry loss.

    Computed from the tokens, not copied from any earlier summary: this is what C1 is checked on.

    Raises:
        VersionUnknownError: a branch has no loss token, or one without a version.
    """
    carries_loss = loss_mask != 0
    none = np.iinfo(np.int32).max
    oldest = np.minimum.reduceat(np.where(carries_loss, weight_versions, none), offsets[:-1]).astype(np.int32)
    unknown = np.flatnonzero((oldest <= NO_VERSION) | (oldest == none))
    if len(unknown):
        raise VersionUnknownError(
            f"expected a version for every loss token, and loss tokens; branches {unknown} differ"
        )
    return oldest


def select(batch: TrainBatch, branch_indices: npt.ArrayLike) -> TrainBatch:
    """The given branches of a batch, in the given order; ``sample_ids`` keep saying where they came from.

    Args:
        batch: any batch.
        branch_indices: integers [S'] in [0, S).
    """
    indices = np.asarray(branch_indices, dtype=np.int64)
    lengths = np.diff(batch.offsets)[indices]
    offsets = np.zeros(len(indices) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Token t of the result, in branch s, is token t - offsets[s] + (start of s in the batch).
    tokens = np.arange(offsets[-1]) + np.repeat(batch.offsets[indices] - offsets[:-1], lengths)
    return TrainBatch(
        tokens=batch.tokens[tokens],
        offsets=offsets,
        loss_mask=batch.loss_mask[tokens],
        rollout_logprobs=batch.rollout_logprobs[tokens],
        weight_versions=batch.weight_versions[tokens],
        oldest_versions=batch.oldest_versions[indices],
        advantages=batch.advantages[indices],
        rewards=batch.rewards[indices],
        sample_ids=batch.sample_ids[indices],
    )
