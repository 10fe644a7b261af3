"""A batch onto data-parallel ranks: equal work, packed into equally many micro-batches (M2).

Ranks with another number of micro-batches would not meet in their collectives.
"""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np

from miles_async.train_data.balance import Ranks, balance
from miles_async.train_data.batch import BranchTable, experts_of, part
from miles_async.train_data.siblings import Siblings, balance_siblings
from miles_async.train_data.work import sequence_work
from miles_async.types import Int64, TrainBatch, TrainShard

FILLER = -1
"""Sample and group id of a single token without loss, which only makes the number of micro-batches equal."""


def split(
    table: BranchTable,
    dp_size: int,
    max_tokens: int,
    samples_per_optimizer_step: int | None,
    target_version: int,
    quadratic_work: float = 0.0,
    *,
    share_prefixes: bool = False,
) -> tuple[TrainShard, ...]:
    """One shard per rank; every branch of the batch is in exactly one micro-batch of one of them.

    Optimizer steps take samples in batch order, so groups stay together where the sizes allow, and all branches of a
    sample do. Within a step, ranks get equal work as nearly as their branches allow (``balance``). A rank with fewer
    branches, or families that are kept together, than others have micro-batches gets fillers.

    Args:
        table: of the whole batch.
        dp_size: ranks.
        max_tokens: per micro-batch; a longer branch gets one of its own.
        samples_per_optimizer_step: None: all in one step. If there is no multiple of it, steps are as equal as
            possible. A sample counts once, whatever its branches.
        target_version: the version the batch was cut for.
        quadratic_work: of the model, see ``work.quadratic_work``; 0: work is the number of tokens.
        share_prefixes: a micro-batch's samples of one prompt pass it through the model once: keep them together.
    """
    assert len(table.branches) > 0
    assert dp_size > 0
    num_samples = int(table.sample_ids[-1]) + 1
    steps = -(-num_samples // (samples_per_optimizer_step or num_samples))
    firsts = [int(samples[0]) for samples in np.array_split(np.arange(num_samples), steps)]
    branches = np.split(np.arange(len(table.branches)), np.searchsorted(table.sample_ids, firsts[1:]))
    shares = share_prefixes and not table.routed  # where experts are replayed, every sample has its own
    plans = [_plan(table, indices, dp_size, max_tokens, quadratic_work, shares=shares) for indices in branches]
    dealt = [_deal(table, indices, plan) for indices, plan in zip(branches, plans, strict=True)]
    return tuple(
        TrainShard(
            dp_rank=rank,
            dp_size=dp_size,
            target_version=target_version,
            optimizer_steps=tuple(step[rank] for step in dealt),
            loss_tokens=tuple(int(table.loss_tokens[indices].sum()) for indices in branches),
        )
        for rank in range(dp_size)
    )


def _plan(
    table: BranchTable, indices: Int64, dp_size: int, max_tokens: int, quadratic_work: float, *, shares: bool
) -> Ranks:
    """Which of ``indices``, by position, are in which micro-batch of which rank."""
    lengths = table.lengths[indices]
    work = sequence_work(lengths, quadratic_work)
    if not shares:
        return balance(lengths.tolist(), work, dp_size, max_tokens)
    siblings = Siblings.of(table, indices)
    prompt_work = sequence_work(siblings.prompt_lengths, quadratic_work)
    return balance_siblings(lengths.tolist(), work, prompt_work, siblings, dp_size, max_tokens)


def _deal(table: BranchTable, indices: Int64, plan: Ranks) -> list[tuple[TrainBatch, ...]]:
    """The micro-batches of one optimizer step, per rank."""
    bins = [indices[sorted(members)] for of_rank in plan for members in of_rank]
    whole = table.join(np.concatenate(bins))  # one allocation for all ranks is a fifth faster than one for each
    ends = np.cumsum([len(members) for members in bins]).tolist()
    micro_batches = iter([part(whole, first, end) for first, end in pairwise([0, *ends])])
    count = max(map(len, plan))
    filler = _filler(table, int(indices[0]))
    return [(*islice(micro_batches, len(of_rank)), *[filler] * (count - len(of_rank))) for of_rank in plan]


def _filler(table: BranchTable, index: int) -> TrainBatch:
    branch = table.branches[index]
    return TrainBatch(
        tokens=branch.tokens[:1].copy(),
        offsets=np.array([0, 1], dtype=np.int64),
        loss_mask=np.zeros(1, dtype=np.uint8),
        rollout_logprobs=np.zeros(1, dtype=np.float32),
        weight_versions=branch.weight_versions[:1].copy(),
        oldest_versions=table.oldest_versions[index : index + 1],
        advantages=np.zeros(1, dtype=np.float32),
        rewards=np.zeros(1, dtype=np.float32),
        sample_ids=np.full(1, FILLER, dtype=np.int64),
        group_ids=np.full(1, FILLER, dtype=np.int64),
        routed_experts=experts_of(branch)[:1].copy() if table.routed else None,
        teacher_logprobs=np.zeros(1, dtype=np.float32) if table.taught else None,
    )
