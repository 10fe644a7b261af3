"""A batch onto data-parallel ranks: pack first, then deal the bins (M2).

All ranks get the same number of micro-batches, or their collectives would not meet.
"""

from __future__ import annotations

import numpy as np

from miles_async.train_data.batch import select
from miles_async.train_data.packing import Bin, pack, split_to
from miles_async.types import Int64, TrainBatch, TrainShard

FILLER = -1
"""Sample id of a copy of a short branch, without loss, that only makes the number of micro-batches equal."""


def split(
    batch: TrainBatch,
    dp_size: int,
    max_tokens: int,
    samples_per_optimizer_step: int | None,
    target_version: int,
) -> tuple[TrainShard, ...]:
    """One shard per rank; every branch of the batch is in exactly one micro-batch of one of them.

    Optimizer steps take samples in batch order, so groups stay together where the sizes allow, and all branches of a
    sample do. Within a step, tokens per rank differ by less than the largest micro-batch. A step whose bins can't be
    made a multiple of ``dp_size`` (fewer branches than that; possible with partial groups) is filled up with fillers.

    Args:
        batch: in order of ``sample_ids``, which count from 0.
        dp_size: ranks.
        max_tokens: per micro-batch.
        samples_per_optimizer_step: None: all in one step. If there is no multiple of it, steps are as equal as
            possible. A sample counts once, whatever its branches.
        target_version: the version the batch was cut for.

    Raises:
        ConfigurationError: a branch is longer than ``max_tokens``.
    """
    assert batch.num_branches > 0
    assert dp_size > 0
    num_samples = int(batch.sample_ids[-1]) + 1
    steps = -(-num_samples // (samples_per_optimizer_step or num_samples))
    firsts = [int(samples[0]) for samples in np.array_split(np.arange(num_samples), steps)]
    branches = np.split(np.arange(batch.num_branches), np.searchsorted(batch.sample_ids, firsts[1:]))
    dealt = [_deal(batch, indices, dp_size, max_tokens) for indices in branches]
    loss_tokens = tuple(sum(int(m.loss_mask.sum()) for rank in step for m in rank) for step in dealt)
    return tuple(
        TrainShard(
            dp_rank=rank,
            dp_size=dp_size,
            target_version=target_version,
            optimizer_steps=tuple(step[rank] for step in dealt),
            loss_tokens=loss_tokens,
        )
        for rank in range(dp_size)
    )


def _deal(batch: TrainBatch, indices: Int64, dp_size: int, max_tokens: int) -> list[tuple[TrainBatch, ...]]:
    """The micro-batches of one optimizer step, per rank.

    In rounds of ``dp_size`` bins, largest first, the largest of a round goes to the rank with the fewest
    tokens. Then two ranks never differ by more than the bins of some one round do: the lighter of them gets the
    larger bin, so their difference either shrinks or changes sign, and then is at most that of the two bins.
    """
    lengths = np.diff(batch.offsets)[indices].tolist()
    bins = pack(lengths, max_tokens)
    bins = split_to(bins, lengths, -(-len(bins) // dp_size) * dp_size)
    bins.sort(key=lambda members: -sum(lengths[i] for i in members))
    micro_batches = [_micro_batch(batch, indices, members) for members in bins]
    if missing := -len(micro_batches) % dp_size:
        filler = _filler(batch, int(indices[int(np.argmin(lengths))]))
        micro_batches += [filler] * missing
    ranks: list[list[TrainBatch]] = [[] for _ in range(dp_size)]
    totals = [0] * dp_size
    for start in range(0, len(micro_batches), dp_size):
        lightest_first = sorted(range(dp_size), key=lambda rank: totals[rank])
        for rank, micro_batch in zip(lightest_first, micro_batches[start : start + dp_size], strict=True):
            ranks[rank].append(micro_batch)
            totals[rank] += len(micro_batch.tokens)
    return [tuple(rank) for rank in ranks]


def _micro_batch(batch: TrainBatch, indices: Int64, members: Bin) -> TrainBatch:
    return select(batch, indices[sorted(members)])


def _filler(batch: TrainBatch, index: int) -> TrainBatch:
    copy = select(batch, [index])
    return TrainBatch(
        tokens=copy.tokens,
        offsets=copy.offsets,
        loss_mask=np.zeros_like(copy.loss_mask),
        rollout_logprobs=np.zeros_like(copy.rollout_logprobs),
        weight_versions=copy.weight_versions,
        oldest_versions=copy.oldest_versions,
        advantages=np.zeros_like(copy.advantages),
        rewards=np.zeros_like(copy.rewards),
        sample_ids=np.full(1, FILLER, dtype=np.int64),
    )
