"""Groups that were cut → what the trainer's ranks train on, and what is worth logging about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from miles_async.api import AdvantageEstimator
from miles_async.staleness.policy import check_ages
from miles_async.train_data.batch import BranchTable, tabulate
from miles_async.train_data.dp_split import split
from miles_async.train_data.metrics import age_histogram, batch_metrics
from miles_async.types import Group, PreparedBatch, TrainBatch, TrainShard

RecordBatch = Callable[[tuple[Group, ...], tuple[TrainShard, ...], float], None]
"""(groups, their shards, ``quadratic_work`` of the split)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMaker:
    """advantages → data-parallel split → packing → flat arrays, as one pure function of the groups."""

    estimator: AdvantageEstimator
    dp_size: int
    max_tokens: int  # per micro-batch
    quadratic_work: float = 0.0  # of the model that is trained, see ``train_data.work``
    samples_per_optimizer_step: int
    bound: int | None  # C1
    share_prefixes: bool = False  # ranks pass what samples begin with alike through the model once
    routed: bool = False  # experts that engines chose go with the tokens
    taught: bool = False  # so do log-probs of a teacher
    record: RecordBatch | None = None  # called with every batch

    def make(
        self, groups: tuple[Group, ...], target_version: int, *, batch_id: int, put: Callable[[TrainShard], object]
    ) -> PreparedBatch:
        """``put`` stores a shard and returns the reference that crosses processes (``ray.put``).

        Raises ContractViolation if a sample is too old, or is nothing that can be trained on; ConfigurationError if
        it lacks the experts that are replayed, or the log-probs of a teacher.
        """
        table = self._tabulate(groups)
        shards = self._split(groups, table, target_version)
        return PreparedBatch(
            batch_id=batch_id,
            target_version=target_version,
            oldest_version=min(group.oldest_version for group in groups),
            prompt_ids=tuple(group.attempt.prompt.prompt_id for group in groups),
            shards=tuple(map(put, shards)),
            metrics=batch_metrics(groups, table, target_version),
            ages=age_histogram(table, target_version),
        )

    def shards(self, groups: tuple[Group, ...], target_version: int) -> tuple[TrainShard, ...]:
        """The shards alone, by data-parallel rank. Raises as :meth:`make`."""
        return self._split(groups, self._tabulate(groups), target_version)

    def _split(self, groups: tuple[Group, ...], table: BranchTable, target_version: int) -> tuple[TrainShard, ...]:
        check_ages(table.oldest_versions.tolist(), target_version, self.bound)
        shards = split(
            table,
            dp_size=self.dp_size,
            max_tokens=self.max_tokens,
            samples_per_optimizer_step=self.samples_per_optimizer_step,
            target_version=target_version,
            quadratic_work=self.quadratic_work,
            share_prefixes=self.share_prefixes,
        )
        if self.record is not None:
            self.record(groups, shards, self.quadratic_work)
        return shards

    def flatten(self, groups: tuple[Group, ...]) -> TrainBatch:
        """The whole batch, before it is split: samples in the order of the groups."""
        table = self._tabulate(groups)
        return table.join(range(len(table.branches)))

    def _tabulate(self, groups: tuple[Group, ...]) -> BranchTable:
        return tabulate(groups, self.estimator(groups), routed=self.routed, taught=self.taught)
