"""Norms of the gradients of single trajectories, for ``--advantage-estimator opob``.

Every trajectory takes one forward and backward pass before the first optimizer step, with a micro-batch per branch. Its
gradient is accumulated in the optimizer's buffers and summed over the ranks of one model replica (tensor, pipeline and
context parallel). Nothing is reduced over data-parallel ranks, which may have different numbers of trajectories; so
experts must not be shared among them (``arguments/algorithm_checks.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

# Private in megatron-core 0.19, whose finalize_model_grads also reduces over data-parallel ranks.
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
    _allreduce_word_embedding_grads,
)
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.nn import Module

from miles_async.algorithms.objective import LossSums
from miles_async.algorithms.whole_batch.transform import Trajectories
from miles_async.backends.megatron.distributed import gather_from_replicas
from miles_async.backends.megatron.model.forward import Pipeline
from miles_async.backends.megatron.model.output import ModelOutput
from miles_async.backends.megatron.model.scores import Scorer
from miles_async.backends.megatron.packing.pack import PackedBatch, PackLayout, pack_batch
from miles_async.runtime.rank_records import gather_records
from miles_async.train_data.batch import part
from miles_async.train_data.batch_maker import FILLER
from miles_async.types import TrainBatch, TrainShard

CHUNK = 2**24  # elements of a gradient that are squared at one time, in float64

Branches = list[TrainBatch]
"""The branches of one trajectory, each as a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientNorms:
    """Computes the norms with the policy's part on this rank."""

    policy: Pipeline
    scorer: Scorer
    layout: PackLayout
    device: torch.device

    def of(self, shard: TrainShard) -> Trajectories | None:
        """Trajectories of the shard, each of the rollout batch on one data-parallel rank, whole; None before the last
        pipeline stage. Overwrites gradients. Collective.
        """
        trajectories = _whole_trajectories(shard, self.device)
        squares, logs = torch.zeros(2, len(trajectories), dtype=torch.float64, device=self.device)
        for index, branches in enumerate(trajectories):
            squares[index], logs[index] = self._measured(branches, shard.target_version)
        dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        if not parallel_state.is_pipeline_last_stage():
            return None
        firsts = [branches[0] for branches in trajectories]
        return Trajectories(
            group_ids=self._tensor([int(first.group_ids[0]) for first in firsts], torch.int64),
            advantages=self._tensor([float(first.advantages[0]) for first in firsts], torch.float64),
            log_weights=logs,
            squared_norms=squares,
        )

    def _measured(self, branches: Branches, version: int) -> tuple[Tensor, Tensor]:
        """(this rank's part of the squared norm, log w on the last pipeline stage), float64."""
        for module in self.policy.modules:
            module.zero_grad_buffer()  # type: ignore[operator]
        packs = [pack_batch(branch, version, self.layout, self.device) for branch in branches]
        with _reduced_within_replica(self.policy.modules):
            sums = self.policy.accumulate_gradients(packs, self._log_probability)
        log_weight = sum((of_branch["log_weight"] for of_branch in sums), self._tensor(0.0, torch.float64))
        return _squared_norm(self.policy.modules, self.device), log_weight

    def _log_probability(self, packed: PackedBatch, output: ModelOutput) -> LossSums:
        # Both log-probs are 0 where no loss is carried.
        logprobs, batch = self.scorer.logprobs(packed, output), packed.batch
        return LossSums(
            loss=logprobs.sum(),
            count=batch.loss_mask.count_nonzero(),
            metrics={"log_weight": (logprobs.detach().double() - batch.rollout_logprobs).sum()},
            batch=batch,
        )

    def _tensor(self, values: float | list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _whole_trajectories(shard: TrainShard, device: torch.device) -> list[Branches]:
    """Bring the branches of a trajectory that several data-parallel ranks share to the first of them. Collective."""
    own: dict[int, Branches] = {}
    for batch in (batch for step in shard.optimizer_steps for batch in step):
        for index, sample in enumerate(batch.sample_ids.tolist()):
            if sample != FILLER:
                own.setdefault(sample, []).append(part(batch, index, index + 1))
    samples, ranks = gather_from_replicas(torch.tensor(list(own), dtype=torch.int64, device=device)).unique(
        return_counts=True
    )
    if not (divided := samples[ranks > 1].tolist()):
        return list(own.values())
    group = parallel_state.get_data_parallel_group()
    mine = {sample: own[sample] for sample in divided if sample in own}
    found = gather_records(mine, dict[int, Branches], group)
    for sample in divided:
        holders = [rank for rank, of_rank in enumerate(found) if sample in of_rank]
        if holders[0] == group.rank():
            own[sample] = [branch for rank in holders for branch in found[rank][sample]]
        else:
            own.pop(sample, None)
    return list(own.values())


@contextmanager
def _reduced_within_replica(modules: Sequence[Module]) -> Iterator[None]:
    """Inside, gradients are neither reduced over data-parallel ranks nor divided."""
    config = get_model_config(modules[0])
    finalize, no_sync = config.finalize_model_grads_func, config.no_sync_func
    config.finalize_model_grads_func, config.no_sync_func = _finalize, None
    try:
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(module.no_sync())  # type: ignore[operator]
            yield
    finally:
        config.finalize_model_grads_func, config.no_sync_func = finalize, no_sync


def _finalize(modules: list[Any], *_: Any, **__: Any) -> None:
    """Megatron's ``finalize_model_grads`` without data-parallel ranks."""
    config, context = get_model_config(modules[0]), parallel_state.get_context_parallel_group()
    if context.size() > 1:
        for module in modules:
            for buffer in module.buffers + module.expert_parallel_buffers:
                dist.all_reduce(buffer.grad_data, group=context)
    _allreduce_non_tensor_model_parallel_grads(modules, config)
    _allreduce_word_embedding_grads(modules, config)


def _squared_norm(modules: Sequence[Module], device: torch.device) -> Tensor:
    """float64, of the gradients of this rank's weights; weights that ranks share count on one of them."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        counts = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
        if parameter.requires_grad and counts:
            for chunk in parameter.main_grad.flatten().split(CHUNK):
                total += chunk.double().square().sum()
    return total
