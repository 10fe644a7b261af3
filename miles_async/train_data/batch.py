"""Tables of the branches of a batch, and flat per-token arrays made from them (M2).

Ages, ranks and micro-batches are decided from lengths, versions and rewards alone. Until then tokens stay in their
samples, to which a ``BranchTable`` refers; ``join`` copies them once, and micro-batches are views of its result.

``weight_versions`` travels like every other per-token array, so that the loss and the C1 check see the versions of
exactly their tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from miles_async.algorithms.advantages.rewards import rewards_of, sizes_of
from miles_async.errors import ConfigurationError, ContractViolation
from miles_async.types import NOT_SHOWN, Branch, Float32, Group, Int32, Int64, RoutedExperts, TrainBatch, TrainShard


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchTable:
    """The branches of a batch, checked, in the order of their samples."""

    branches: tuple[Branch, ...]  # [S]
    lengths: Int64  # [S] tokens
    prompt_lengths: Int64  # [S] tokens before the response
    loss_tokens: Int64  # [S] tokens that carry loss
    oldest_versions: Int32  # [S] of these, read from the tokens: C1 is checked on them
    newest_versions: Int32  # [S]
    advantages: Float32  # [S] of the sample, or [N] per token, as in TrainBatch
    rewards: Float32  # [S] of the sample
    sample_ids: Int64  # [S] the sample's position in the batch
    group_ids: Int64  # [S] the group's position in the batch
    shown: npt.NDArray[np.bool_]  # [S] whether the trainer's scores of the branch are wanted
    with_experts: bool = False  # join also the experts of every token
    with_teacher: bool = False  # join also a teacher's log-probs

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
            advantages=self._advantages(chosen),
            rewards=self.rewards[chosen],
            sample_ids=self.sample_ids[chosen],
            group_ids=self.group_ids[chosen],
            shown=np.where(self.shown[chosen], chosen, NOT_SHOWN),
            routed_experts=np.concatenate([experts_of(branch) for branch in branches]) if self.with_experts else None,
            teacher_logprobs=np.concatenate([teacher_of(branch) for branch in branches]) if self.with_teacher else None,
            pictures=tuple(branch.pictures for branch in branches) if self.with_pictures else None,
        )

    @property
    def with_pictures(self) -> bool:
        """Return whether any branch has images."""
        return any(branch.pictures for branch in self.branches)

    def _advantages(self, chosen: Int64) -> Float32:
        if len(self.advantages) == len(self.branches):
            return self.advantages[chosen]
        offsets = _offsets(self.lengths)
        return np.concatenate([self.advantages[offsets[index] : offsets[index + 1]] for index in chosen.tolist()])


def tabulate(
    groups: Sequence[Group],
    advantages: Float32,
    *,
    with_experts: bool = False,
    with_teacher: bool = False,
    shown: Collection[int] = (),
) -> BranchTable:
    """Tabulate the branches of all samples of the groups, in order.

    Args:
        groups: at least one.
        advantages: one per sample in the same order, or one per token of all their branches.
        with_experts: join also the experts that were chosen for the tokens.
        with_teacher: join also a teacher's log-probs.
        shown: positions of the groups whose scores by the trainer are wanted.

    Raises:
        ConfigurationError: a sample lacks the experts, or the teacher's log-probs, that are to be joined.
        VersionUnknownError: a branch has no loss token, or one without a version.
        ContractViolation: a loss token has no finite log-prob or advantage, despite ``rollout.generate`` and the
            guards of rewards.
    """
    assert groups, "a batch holds at least one group"
    blocks = [group.columns for group in groups]
    in_group, prompt_lengths, lengths, loss_tokens, oldest, newest, finite_logprobs = np.concatenate(blocks).T.copy()
    sizes = sizes_of(groups)
    group_ids = np.repeat(np.arange(len(groups)), [len(block) for block in blocks])
    sample_ids = in_group + (np.cumsum(sizes) - sizes)[group_ids]
    _refuse("log-prob for every loss token", sample_ids[finite_logprobs == 0])
    branches = tuple(branch for group in groups for sample in group.samples for branch in sample.branches)
    for branch in branches if with_experts or with_teacher else ():
        assert not with_experts or len(experts_of(branch)) == len(branch.tokens), "experts are not of these tokens"
        assert not with_teacher or len(teacher_of(branch)) == len(branch.tokens), "log-probs belong to other tokens"
    return BranchTable(
        branches=branches,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        loss_tokens=loss_tokens,
        oldest_versions=oldest.astype(np.int32),
        newest_versions=newest.astype(np.int32),
        advantages=_checked(np.asarray(advantages, dtype=np.float32), branches, lengths, sample_ids),
        rewards=rewards_of(groups)[sample_ids],
        sample_ids=sample_ids,
        group_ids=group_ids,
        shown=np.isin(group_ids, [*shown]),
        with_experts=with_experts,
        with_teacher=with_teacher,
    )


def experts_of(branch: Branch) -> RoutedExperts:
    """The experts that a branch's tokens passed through. Raises ConfigurationError if it has none."""
    if branch.routed_experts is None:
        raise ConfigurationError(
            "--use-rollout-routing-replay: expected the experts of every token, found a sample without them: it was "
            "generated without this flag (a checkpoint, a dump), or --custom-generate-function-path left them out; "
            "remove the flag, or let generated samples have routed_experts"
        )
    return branch.routed_experts


def teacher_of(branch: Branch) -> Float32:
    """The teacher's log-probs of a branch. Raises ConfigurationError if it has none."""
    if branch.teacher_logprobs is None:
        raise ConfigurationError(
            "--use-opd: expected the teacher's log-prob of every token, found a sample without them: it was generated "
            "without this flag (a checkpoint, a dump); remove the flag, or start from samples that have them"
        )
    return branch.teacher_logprobs


def _checked(advantages: Float32, branches: Sequence[Branch], lengths: Int64, sample_ids: Int64) -> Float32:
    """Turn advantages of samples into advantages of branches, [S]; zero advantages of tokens, [N], without loss."""
    samples, tokens = int(sample_ids[-1]) + 1, int(lengths.sum())
    if len(advantages) == samples:
        _refuse("advantage for every sample", np.flatnonzero(~np.isfinite(advantages)))
        return advantages[sample_ids]
    if len(advantages) != tokens:
        raise ContractViolation(
            f"--advantage-estimator: expected {samples} advantages, one per sample, or {tokens}, one per token; "
            f"found {len(advantages)}"
        )
    loss_mask = np.concatenate([branch.loss_mask for branch in branches])
    advantages = np.where(loss_mask != 0, advantages, np.float32(0.0))
    _refuse("advantage for every loss token", np.repeat(sample_ids, lengths)[~np.isfinite(advantages)])
    return advantages


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
        advantages=batch.advantages[branches if per_branch(batch) else tokens],
        rewards=batch.rewards[branches],
        sample_ids=batch.sample_ids[branches],
        group_ids=batch.group_ids[branches],
        shown=batch.shown[branches],
        routed_experts=None if batch.routed_experts is None else batch.routed_experts[tokens],
        teacher_logprobs=None if batch.teacher_logprobs is None else batch.teacher_logprobs[tokens],
        pictures=None if batch.pictures is None else batch.pictures[branches],
    )


def token_advantages(batch: TrainBatch) -> Float32:
    """float32 [N]: an advantage for every token, 0 where no loss is carried."""
    per_token = np.repeat(batch.advantages, np.diff(batch.offsets)) if per_branch(batch) else batch.advantages
    return np.where(batch.loss_mask != 0, per_token, np.float32(0.0))


def per_branch(batch: TrainBatch) -> bool:
    """Return whether the advantages are one per branch, not per token."""
    # If every branch has one token, both readings are the same.
    return len(batch.advantages) == batch.num_branches


def _offsets(lengths: Int64) -> Int64:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _refuse(expected: str, without: Int64) -> None:
    if len(without):
        raise ContractViolation(f"expected a finite {expected}; samples {np.unique(without)} differ")


DIGEST_BYTES = 16


def digests(shards: Sequence[TrainShard]) -> dict[str, str]:
    """Field of TrainBatch → hash of that array over all micro-batches of all ranks, in order; and ``layout``: how
    they are dealt to ranks and optimizer steps. Arrays that batches don't have are left out.
    """
    batches = [batch for shard in shards for step in shard.optimizer_steps for batch in step]
    layout = [
        (rank, len(shards), shard.target_version, [len(step) for step in shard.optimizer_steps], shard.loss_tokens)
        for rank, shard in enumerate(shards)
    ]
    result = {"layout": hashlib.blake2b(msgspec.msgpack.encode(layout), digest_size=DIGEST_BYTES).hexdigest()}
    for name in TrainBatch.__struct_fields__:
        arrays = [getattr(batch, name) for batch in batches]
        if name == "shown" or any(array is None for array in arrays):  # what people look at changes no training
            continue
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for array in arrays:
            if name == "pictures":
                hasher.update(msgspec.msgpack.encode([[picture.digest for picture in own] for own in array]))
            else:
                hasher.update(array.data)  # offsets are hashed too, so where one ends is
        result[name] = hasher.hexdigest()
    return result
