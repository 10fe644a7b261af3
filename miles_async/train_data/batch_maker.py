"""Make the groups of a cut into a shard for each data-parallel rank, with metrics (M2)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Protocol

import numpy as np

from miles_async.api import AdvantageEstimator
from miles_async.staleness.policy import check_ages
from miles_async.train_data.balance import Ranks, balance
from miles_async.train_data.batch import BranchTable, experts_of, part, tabulate
from miles_async.train_data.metrics import age_histogram, batch_metrics
from miles_async.train_data.siblings import Siblings, balance_siblings
from miles_async.train_data.work import sequence_work
from miles_async.types import NOT_SHOWN, Group, Int64, PreparedBatch, TrainBatch, TrainShard

FILLER = -1
"""Sample and group id of a single token without loss, which only makes the number of micro-batches equal."""

RecordBatch = Callable[[tuple[Group, ...], tuple[TrainShard, ...], float], None]
"""(groups, their shards, ``quadratic_work`` of the split)"""


class Viewer(Protocol):
    """Shows batches to people. Called in the thread that makes them; must not wait."""

    def chosen(self, batch_id: int, groups: int) -> Collection[int]:
        """Positions of the groups, of so many, whose scores by the trainer are wanted."""
        ...

    def batch(self, batch_id: int, target_version: int, groups: tuple[Group, ...], table: BranchTable) -> None:
        """Take a batch. ``table``: the branches of all groups."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMaker:
    """A pure function of the groups: advantages → data-parallel split → packing → flat arrays."""

    estimator: AdvantageEstimator
    dp_size: int  # ranks
    max_tokens: int  # per micro-batch; a longer branch gets its own
    quadratic_work: float = 0.0  # of the model, see ``work.quadratic_work``; 0: work is the number of tokens
    optimizer_steps: int  # on each batch; the last ones have only fillers if it has fewer samples
    bound: int | None  # C1
    share_prefixes: bool = False  # a prompt passes through the model once per micro-batch: keep its samples together
    with_experts: bool = False  # shards have the experts that engines chose
    with_teacher: bool = False  # shards have a teacher's log-probs
    record: RecordBatch | None = None  # called with every batch
    viewer: Viewer | None = None  # sees every batch of :meth:`make`

    def make(
        self, groups: tuple[Group, ...], target_version: int, *, batch_id: int, put: Callable[[TrainShard], object]
    ) -> PreparedBatch:
        """``put`` stores a shard and returns the reference that crosses processes (``ray.put``).

        Raises ContractViolation if a sample is too old or cannot be trained on, ConfigurationError if it lacks the
        experts to replay or a teacher's log-probs.
        """
        shown = self.viewer.chosen(batch_id, len(groups)) if self.viewer is not None else ()
        table = self._tabulate(groups, shown)
        prepared = PreparedBatch(
            batch_id=batch_id,
            target_version=target_version,
            oldest_version=min(group.oldest_version for group in groups),
            prompt_ids=tuple(group.attempt.prompt.prompt_id for group in groups),
            shards=tuple(map(put, self._shards(groups, table, target_version))),
            metrics=batch_metrics(groups, table, target_version),
            ages=age_histogram(table, target_version),
        )
        if self.viewer is not None:
            self.viewer.batch(batch_id, target_version, groups, table)
        return prepared

    def shards(self, groups: tuple[Group, ...], target_version: int) -> tuple[TrainShard, ...]:
        """The shards alone, by data-parallel rank. Raises like :meth:`make`."""
        return self._shards(groups, self._tabulate(groups), target_version)

    def _shards(self, groups: tuple[Group, ...], table: BranchTable, target_version: int) -> tuple[TrainShard, ...]:
        check_ages(table.oldest_versions.tolist(), target_version, self.bound)
        shards = self.split(table, target_version)
        if self.record is not None:
            self.record(groups, shards, self.quadratic_work)
        return shards

    def flatten(self, groups: tuple[Group, ...]) -> TrainBatch:
        """The whole batch before the split, samples in the order of the groups."""
        table = self._tabulate(groups)
        return table.join(range(len(table.branches)))

    def _tabulate(self, groups: tuple[Group, ...], shown: Collection[int] = ()) -> BranchTable:
        return tabulate(
            groups,
            self.estimator(groups),
            with_experts=self.with_experts,
            with_teacher=self.with_teacher,
            shown=shown,
        )

    def split(self, table: BranchTable, target_version: int) -> tuple[TrainShard, ...]:
        """One shard per rank; every branch of the batch is in exactly one micro-batch of one of them.

        Optimizer steps take samples in batch order, so groups stay together where the sizes allow, and all branches of
        a sample do; steps are as equal as possible. Their number doesn't depend on how many samples groups have lost:
        schedules count steps. Within one, ranks get equal work as nearly as their branches allow (``balance``) and
        equally many micro-batches: else they would not meet in their collectives. A rank with fewer branches, or
        families that are kept together, than others have micro-batches gets fillers.
        """
        assert len(table.branches) > 0
        assert self.dp_size > 0
        num_samples = int(table.sample_ids[-1]) + 1
        sizes = [len(samples) for samples in np.array_split(np.arange(num_samples), self.optimizer_steps)]
        ends = np.cumsum(sizes)[:-1]
        branches = np.split(np.arange(len(table.branches)), np.searchsorted(table.sample_ids, ends))
        dealt = [
            _deal(table, indices, self._plan(table, indices)) if len(indices) else [(_filler(table, 0),)] * self.dp_size
            for indices in branches
        ]
        return tuple(
            TrainShard(
                target_version=target_version,
                optimizer_steps=tuple(step[rank] for step in dealt),
                loss_tokens=tuple(int(table.loss_tokens[indices].sum()) for indices in branches),
            )
            for rank in range(self.dp_size)
        )

    def _plan(self, table: BranchTable, indices: Int64) -> Ranks:
        """Assign ``indices``, by position, to micro-batches of ranks."""
        lengths = table.lengths[indices]
        work = sequence_work(lengths, self.quadratic_work)
        if table.with_experts or not self.share_prefixes:  # where experts are replayed, every sample has its own
            return balance(lengths.tolist(), work, self.dp_size, self.max_tokens)
        siblings = Siblings.of(table, indices)
        prompt_work = sequence_work(siblings.prompt_lengths, self.quadratic_work)
        return balance_siblings(lengths.tolist(), work, prompt_work, siblings, self.dp_size, self.max_tokens)


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
        shown=np.full(1, NOT_SHOWN, dtype=np.int64),
        routed_experts=experts_of(branch)[:1].copy() if table.with_experts else None,
        teacher_logprobs=np.zeros(1, dtype=np.float32) if table.with_teacher else None,
        pictures=((),) if table.with_pictures else None,
    )
