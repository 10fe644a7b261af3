"""The critic: a second model on the policy's ranks, in the same layout, which learns values of prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from miles_async.algorithms.objective import LossSums
from miles_async.algorithms.value_loss import ValueLoss
from miles_async.api import Aggregation
from miles_async.arguments.critic import CriticArguments
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.backends.megatron.learner import Learner
from miles_async.backends.megatron.model.build import load_model
from miles_async.backends.megatron.model.output import ModelOutput
from miles_async.backends.megatron.model.scores import values_of
from miles_async.backends.megatron.packing.pack import PackedBatch
from miles_async.backends.megatron.platform import Platform


@dataclass(frozen=True, kw_only=True, slots=True)
class Critic:
    """The model, its loss, and its schedule."""

    learner: Learner
    loss: ValueLoss
    updates: int  # optimizer steps per one of the policy
    rollouts_alone: int  # first rollout steps, in which the policy is not trained

    def gradient(self, packs: Sequence[PackedBatch]) -> tuple[dict[str, Tensor], float]:
        """Compute the gradient, as :meth:`Learner.gradient` does. The micro-batches have values and returns."""

        def loss(packed: PackedBatch, output: ModelOutput) -> LossSums:
            assert packed.returns is not None, "returns come before the first optimizer step"
            return self.loss(values_of(output, packed.sequences), packed.returns, packed.batch)

        return self.learner.gradient(packs, loss)


def load_critic(
    arguments: CriticArguments,
    directory: Path,
    aggregation: Aggregation,
    model: ModelArguments,
    optimizer: OptimizerArguments,
    platform: Platform,
    *,
    device: torch.device,
    total_steps: int,
) -> Critic:
    """Load the critic and make its optimizer, which differs from the policy's in the learning rate. Collective.

    ``directory``: of the policy, from which the critic starts unless its flags name another.
    """
    directory = arguments.critic_hf_checkpoint or directory
    rate = dataclasses.replace(
        optimizer, lr=arguments.critic_lr or optimizer.lr, lr_warmup_iters=arguments.critic_lr_warmup_iters
    )
    loaded = load_model(directory, model, platform, trainable=True, value_head=True)
    return Critic(
        learner=Learner.of(loaded, rate, model, platform, device=device, total_steps=total_steps),
        loss=ValueLoss(aggregation=aggregation, clip=arguments.value_clip),
        updates=arguments.critic_updates_per_step,
        rollouts_alone=arguments.num_critic_only_steps,
    )
