"""Batches and shards for the trainer."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from miles_async.types.pictures import Picture
from miles_async.types.samples import Float32, Int32, Int64, RoutedExperts, UInt8

NOT_SHOWN = -1
"""Entry of ``TrainBatch.shown`` for branches without requested scores."""


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True):
    """All branches of samples, flattened: per-token arrays of length N = offsets[-1], branch s is
    [offsets[s], offsets[s + 1]).

    >>> batch.tokens[batch.offsets[s] : batch.offsets[s + 1]]   # the tokens of branch s

    Every token that carries loss has an advantage. An estimator that gives all tokens of a sample the same is kept as
    one number per branch, [S], which costs nothing per token; one that tells tokens apart is [N], 0 where no loss is
    carried. Trainer ranks expand both to [N] (``train_data.batch.token_advantages``), so every loss sees [N].
    """

    tokens: Int32  # [N]
    offsets: Int64  # [S + 1], offsets[0] == 0
    loss_mask: UInt8  # [N]
    rollout_logprobs: Float32  # [N]
    weight_versions: Int32  # [N] per token, NO_VERSION where no engine generated it
    oldest_versions: Int32  # [S] per branch, over the tokens that carry loss
    advantages: Float32  # [S] or [N], see above
    rewards: Float32  # [S]
    sample_ids: Int64  # [S] the sample's position in the batch before any split; the same for all its branches
    group_ids: Int64  # [S] id of the sample's group
    shown: Int64  # [S] the branch's position in the batch if the scores of its tokens are wanted, else NOT_SHOWN
    routed_experts: RoutedExperts | None = None  # [N, ...] as in Branch, if they are replayed
    teacher_logprobs: Float32 | None = None  # [N] as in Branch, if there is a teacher
    pictures: tuple[tuple[Picture, ...], ...] | None = None  # [S] as in Branch; None if the whole batch has none

    @property
    def num_branches(self) -> int:
        return len(self.offsets) - 1


class TokenScores(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's scores of the T tokens of a branch (``TrainBatch.shown``); 0 for tokens without loss."""

    branch: int  # its position in the batch before any split
    logprobs: Float32 | None  # [T] before the first optimizer step on the batch; None: not computed
    entropies: Float32 | None  # [T] of the distributions, nats, in the optimizer step; None: not computed


class TrainShard(msgspec.Struct, frozen=True, kw_only=True):
    """Training data of one data-parallel rank for one rollout step.

    ``optimizer_steps[i]`` are the micro-batches of the i-th optimizer step, each a TrainBatch packed into one
    sequence of at most ``--max-tokens-per-gpu`` tokens, or one branch that is longer. Every rank has the same number of
    optimizer steps and, within one, the same number of micro-batches, so that collectives line up.
    """

    target_version: int  # the version the optimizer steps from (C1)
    optimizer_steps: tuple[tuple[TrainBatch, ...], ...]
    loss_tokens: tuple[int, ...]  # tokens that carry loss per optimizer step, summed over all ranks; may be 0


class PreparedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that left the buffer: its shards by reference, and facts about it."""

    batch_id: int
    target_version: int
    oldest_version: int
    prompt_ids: tuple[str, ...]  # of its groups
    shards: tuple[object, ...]  # per data-parallel rank, a reference (ray.ObjectRef) to a TrainShard
    metrics: Mapping[str, float]  # reward mean, lengths, ages, ...
    ages: Mapping[int, int]  # age → number of samples
