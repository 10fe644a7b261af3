"""Branches of samples, and flat per-token arrays made of them (M2).

What is decided about a batch (ages, ranks, micro-batches) needs lengths, versions and rewards only. So the tokens stay
where the samples have them, in a ``BranchTable``, until it is known where they go, and are copied once, by ``join``.
Micro-batches are views of what it returns.

``weight_versions`` travels like every other per-token array, so that the loss and the C1 check see the
versions of exactly the tokens they work on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from miles_async.algorithms.advantages import rewards_of
from miles_async.errors import ContractViolation
from miles_async.staleness.versions import count_versions
from miles_async.types import Branch, Float32, Group, Int32, Int64, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchTable:
    """All branches of a batch, checked, in the order of their samples."""

    branches: tuple[Branch, ...]  # [S]
    lengths: Int64  # [S] tokens
    loss_tokens: Int64  # [S] tokens that carry loss
    version_counts: tuple[Mapping[int, int], ...]  # [S] version → tokens that carry loss, counted in the tokens
    oldest_versions: Int32  # [S] the oldest of these: what C1 is checked on
    advantages: Float32  # [S] of the sample
    rewards: Float32  # [S] of the sample
    sample_ids: Int64  # [S] the sample's position in the batch

    def join(self, indices: npt.ArrayLike) -> TrainBatch:
        """Flatten the given branches, integers in [0, S), in the given order."""
        chosen = np.asarray(indices, dtype=np.int64)
        branches = [self.branches[index] for index in chosen.tolist()]
        return TrainBatch(
            tokens=np.concatenate([branch.tokens for branch in branches]),
            offsets=_offsets(self.lengths[chosen]),
            loss_mask=np.concatenate([branch.loss_mask for branch in branches]),
            rollout_logprobs=np.concatenate([branch.rollout_logprobs for branch in branches]),
            weight_versions=np.concatenate([branch.weight_versions for branch in branches]),
            oldest_versions=self.oldest_versions[chosen],
            advantages=self.advantages[chosen],
            rewards=self.rewards[chosen],
            sample_ids=self.sample_ids[chosen],
        )


def tabulate(groups: Sequence[Group], advantages: Float32) -> BranchTable:
    """All branches of all samples of the groups, in order.

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
    branches = tuple(branch for sample in samples for branch in sample.branches)
    sample_ids = np.repeat(np.arange(len(samples), dtype=np.int64), [len(sample.branches) for sample in samples])
    for branch in branches:
        arrays = (branch.tokens, branch.loss_mask, branch.rollout_logprobs, branch.weight_versions)
        lengths = {len(array) for array in arrays}
        assert len(lengths) == 1, f"per-token arrays of a sample differ in length: {lengths}"
    no_logprob = [not _has_logprobs(branch) for branch in branches]
    _refuse("log-prob for every loss token", sample_ids[np.flatnonzero(no_logprob)])
    _refuse("advantage for every sample", np.flatnonzero(~np.isfinite(advantages)))
    version_counts = tuple(map(count_versions, branches))
    return BranchTable(
        branches=branches,
        lengths=np.array([len(branch.tokens) for branch in branches], dtype=np.int64),
        loss_tokens=np.array([sum(counts.values()) for counts in version_counts], dtype=np.int64),
        version_counts=version_counts,
        oldest_versions=np.array([min(counts) for counts in version_counts], dtype=np.int32),
        advantages=advantages[sample_ids],
        rewards=rewards_of(groups)[sample_ids],
        sample_ids=sample_ids,
    )


def part(batch: TrainBatch, first: int, end: int) -> TrainBatch:
    """Branches [first, end) of a batch, as views of its arrays."""
    tokens, branches = slice(batch.offsets[first], batch.offsets[end]), slice(first, end)
    return TrainBatch(
        tokens=batch.tokens[tokens],
        offsets=batch.offsets[first : end + 1] - batch.offsets[first],
        loss_mask=batch.loss_mask[tokens],
        rollout_logprobs=batch.rollout_logprobs[tokens],
        weight_versions=batch.weight_versions[tokens],
        oldest_versions=batch.oldest_versions[branches],
        advantages=batch.advantages[branches],
        rewards=batch.rewards[branches],
        sample_ids=batch.sample_ids[branches],
    )


def _offsets(lengths: Int64) -> Int64:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _has_logprobs(branch: Branch) -> bool:
    finite = np.isfinite(branch.rollout_logprobs)
    return bool(finite.all() or finite[branch.loss_mask != 0].all())


def _refuse(expected: str, without: Int64) -> None:
    if len(without):
        raise ContractViolation(f"C12: expected a finite {expected}; samples {np.unique(without)} differ")
