"""A trained model on this rank: the policy or the critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_async.arguments.model import ModelArguments
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.backends.megatron.distributed import complete_parameters
from miles_async.backends.megatron.metrics import accumulate
from miles_async.backends.megatron.model.build import LoadedModel
from miles_async.backends.megatron.model.forward import LossFunction, Pipeline
from miles_async.backends.megatron.optimizer import make_optimizer
from miles_async.backends.megatron.packing.pack import PackedBatch
from miles_async.backends.megatron.platform import Platform

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """The model's part on this rank, its optimizer, and the schedule of its learning rate."""

    model: Pipeline
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @staticmethod
    def of(
        loaded: LoadedModel,
        arguments: OptimizerArguments,
        model: ModelArguments,
        platform: Platform,
        *,
        device: torch.device,
        total_steps: int,
    ) -> Learner:
        """Make the optimizer and schedule of a trainable model. Collective."""
        optimizer, scheduler = make_optimizer(loaded.modules, arguments, model, platform, total_steps=total_steps)
        complete_parameters(loaded.modules)
        return Learner(model=loaded.pipeline(device), optimizer=optimizer, scheduler=scheduler)

    @property
    def lr(self) -> float:
        """The learning rate of the last optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def gradient(self, packs: Sequence[PackedBatch], loss: LossFunction) -> tuple[dict[str, Tensor], float]:
        """Compute the gradient of an optimizer step, ready for ``optimizer.step()``. Collective.

        Returns metric sums, on the last pipeline stage, and the gradient's norm over all ranks.
        """
        for module in self.model.modules:
            module.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        sums: dict[str, Tensor] = {}
        for of_micro_batch in self.model.accumulate_gradients(packs, loss):
            accumulate(sums, of_micro_batch)
        self.optimizer.prepare_grads()
        return sums, float(self.optimizer.get_grad_norm())
