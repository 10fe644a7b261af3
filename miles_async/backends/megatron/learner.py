"""Trained models on this rank: the policy, and in the same layout the critic, which learns values of prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_async.algorithms.objective import LossSums
from miles_async.algorithms.value_loss import ValueLoss
from miles_async.api import Aggregation
from miles_async.arguments.critic import CriticArguments
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.backends.megatron.distributed import complete_parameters
from miles_async.backends.megatron.metrics import accumulate
from miles_async.backends.megatron.model.build import LoadedModel, load_model
from miles_async.backends.megatron.model.forward import LossFunction, Pipeline
from miles_async.backends.megatron.model.output import ModelOutput
from miles_async.backends.megatron.model.scores import values_of
from miles_async.backends.megatron.optimizer import Training, clip_gradients, gradient_norm, make_optimizer
from miles_async.backends.megatron.packing.pack import PackedBatch

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """A model's part on this rank, its optimizer, and the schedule of its learning rate."""

    model: Pipeline
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    clip_grad: float  # largest norm of a gradient; 0: no bound
    device: torch.device

    @staticmethod
    def of(loaded: LoadedModel, training: Training) -> Learner:
        """Make the optimizer and schedule of a trainable model. Collective."""
        optimizer, scheduler = make_optimizer(loaded.modules, training)
        complete_parameters(loaded.modules)
        return Learner(
            model=loaded.pipeline(training.device),
            optimizer=optimizer,
            scheduler=scheduler,
            clip_grad=training.optimizer.clip_grad,
            device=training.device,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the last optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def gradient(self, packs: Sequence[PackedBatch], loss: LossFunction) -> tuple[dict[str, Tensor], float]:
        """Compute the gradient of an optimizer step, ready for :meth:`step`. Collective.

        Returns metric sums, on the last pipeline stage, and the gradient's norm over all ranks.
        """
        for module in self.model.modules:
            module.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        sums: dict[str, Tensor] = {}
        for of_micro_batch in self.model.accumulate_gradients(packs, loss):
            accumulate(sums, of_micro_batch)
        self.optimizer.prepare_grads()
        return sums, gradient_norm(self.optimizer, self.device)

    def step(self, norm: float) -> None:
        """Make an optimizer step with the gradient, which has this norm. Collective."""
        clip_gradients(self.optimizer, norm, self.clip_grad)
        self.optimizer.step_with_ready_grads()


@dataclass(frozen=True, kw_only=True, slots=True)
class Critic:
    """The critic's model, loss and schedule."""

    learner: Learner
    loss: ValueLoss
    updates: int  # optimizer steps per one of the policy
    rollouts_alone: int  # first rollout steps, in which the policy is not trained

    def gradient(self, packs: Sequence[PackedBatch]) -> tuple[dict[str, Tensor], float]:
        """Compute the gradient, as :meth:`Learner.gradient` does. The micro-batches have values and returns."""

        def loss(packed: PackedBatch, output: ModelOutput) -> LossSums:
            assert packed.returns is not None, "returns come before the first optimizer step"
            return self.loss(values_of(packed, output), packed.returns, packed.batch)

        return self.learner.gradient(packs, loss)


def load_critic(arguments: CriticArguments, directory: Path, aggregation: Aggregation, policy: Training) -> Critic:
    """Load the critic and make its optimizer, which differs from the policy's in the learning rate. Collective.

    ``directory``: of the policy, from which the critic starts unless its flags name another.
    """
    directory = arguments.critic_hf_checkpoint or directory
    optimizer = critic_optimizer(arguments, policy.optimizer)
    loaded = load_model(directory, policy.model, policy.platform, trainable=True, value_head=True)
    return Critic(
        learner=Learner.of(loaded, dataclasses.replace(policy, optimizer=optimizer)),
        loss=ValueLoss(aggregation=aggregation, clip=arguments.value_clip),
        updates=arguments.critic_updates_per_step,
        rollouts_alone=arguments.num_critic_only_steps,
    )


def critic_optimizer(arguments: CriticArguments, policy: OptimizerArguments) -> OptimizerArguments:
    """Settings of the critic's optimizer. Its rate falls to ``--min-lr``, too, unless it begins below that."""
    lr = arguments.critic_lr or policy.lr
    return dataclasses.replace(
        policy, lr=lr, min_lr=min(policy.min_lr, lr), lr_warmup_iters=arguments.critic_lr_warmup_iters
    )
