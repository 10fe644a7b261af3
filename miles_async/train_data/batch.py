"""Samples as flat per-token arrays with offsets, and picking samples out of them (M2).

``weight_versions`` travels like every other per-token array, so that the loss and the C1 check see the
versions of exactly the tokens they work on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from miles_async.errors import VersionUnknownError
from miles_async.train_data.advantages import rewards_of
from miles_async.types import NO_VERSION, Float32, Group, Int32, Int64, TrainBatch, UInt8


def build_batch(groups: Sequence[Group], advantages: Float32) -> TrainBatch:
    """All samples of the groups, in order, flattened.

    Args:
        groups: at least one.
        advantages: float32 [S], in the same order.

    Raises:
        VersionUnknownError: a sample has no loss token, or one without a version.
    """
    samples = [sample for group in groups for sample in group.samples]
    assert len(advantages) == len(samples) > 0, (len(advantages), len(samples))
    for sample in samples:
        lengths = {
            len(sample.tokens),
            len(sample.loss_mask),
            len(sample.rollout_logprobs),
            len(sample.weight_versions),
        }
        assert len(lengths) == 1, f"per-token arrays of a sample differ in length: {lengths}"
    offsets = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum([len(sample.tokens) for sample in samples], out=offsets[1:])
    loss_mask = np.concatenate([sample.loss_mask for sample in samples])
    weight_versions = np.concatenate([sample.weight_versions for sample in samples])
    return TrainBatch(
        tokens=np.concatenate([sample.tokens for sample in samples]),
        offsets=offsets,
        loss_mask=loss_mask,
        rollout_logprobs=np.concatenate([sample.rollout_logprobs for sample in samples]),
        weight_versions=weight_versions,
        oldest_versions=oldest_per_sample(weight_versions, loss_mask, offsets),
        advantages=advantages,
        rewards=rewards_of(groups),
        sample_ids=np.arange(len(samples), dtype=np.int64),
    )


def oldest_per_sample(weight_versions: Int32, loss_mask: UInt8, offsets: Int64) -> Int32:
    """int32 [S]: per sample, the oldest version among its tokens that carry loss.

    Computed from the tokens, not copied from any earlier summary: this is what C1 is checked on.

    Raises:
        VersionUnknownError: a sample has no loss token, or one without a version.
    """
    carries_loss = loss_mask != 0
    none = np.iinfo(np.int32).max
    oldest = np.minimum.reduceat(np.where(carries_loss, weight_versions, none), offsets[:-1]).astype(np.int32)
    unknown = np.flatnonzero((oldest <= NO_VERSION) | (oldest == none))
    if len(unknown):
        raise VersionUnknownError(f"expected a version for every loss token, and loss tokens; samples {unknown} differ")
    return oldest


def select(batch: TrainBatch, sample_indices: npt.ArrayLike) -> TrainBatch:
    """The given samples of a batch, in the given order; ``sample_ids`` keep saying where they came from.

    Args:
        batch: any batch.
        sample_indices: integers [S'] in [0, S).
    """
    indices = np.asarray(sample_indices, dtype=np.int64)
    lengths = np.diff(batch.offsets)[indices]
    offsets = np.zeros(len(indices) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Token t of the result, in sample s, is token t - offsets[s] + (start of s in the batch).
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
