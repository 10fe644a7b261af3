"""The frozen reference model of this rank, which follows the policy (``algorithms/reference_updates.py``).

An average of weights in fewer bits than fp32 is kept in fp32 on the host: rounding would swallow small changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.utils import unwrap_model
from torch import Tensor

from miles_async.algorithms.reference_updates import ReferenceUpdates

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

PREFIX = "reference"


@dataclass(kw_only=True, slots=True)
class FollowingReference:
    """The frozen model's modules beside those of the policy."""

    modules: Sequence[Module]
    policy: Sequence[Module]  # the same, trained
    updates: ReferenceUpdates
    steps: int = 0  # rollout steps so far
    averages: dict[Parameter, Tensor] = field(default_factory=dict)  # fp32, of parameters in fewer bits

    @torch.no_grad()
    def after_rollout_step(self) -> None:
        """Follow the policy if it is time to."""
        self.steps += 1
        if not self.updates.due(self.steps):
            return
        policy = [dict(unwrap_model(module).named_parameters()) for module in self.policy]
        for index, name, parameter in self._parameters():
            kept = self._kept(parameter)
            self.updates.follow(kept, policy[index][name])
            if kept is not parameter:
                parameter.copy_(kept)

    def sharded_state(self) -> ShardedStateDict:
        """Megatron's sharded state of the weights, under names of their own."""
        sharded = [module.sharded_state_dict() for module in self.modules]  # type: ignore[operator]
        return {
            f"{index}": {
                name: make_sharded_optimizer_tensor(sharded[index][name], self._kept(parameter).detach(), PREFIX)
                for at, name, parameter in self._parameters()
                if at == index
            }
            for index in range(len(self.modules))
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Continue from what :meth:`sharded_state` was saved as, after so many rollout steps."""
        self.steps = steps
        for index, name, parameter in self._parameters():
            found = state[f"{index}"][name]
            self._kept(parameter).copy_(found)
            parameter.copy_(found)

    def _parameters(self) -> Iterator[tuple[int, str, Parameter]]:
        for index, module in enumerate(self.modules):
            for name, parameter in unwrap_model(module).named_parameters():
                yield index, name, parameter

    def _kept(self, parameter: Parameter) -> Tensor:
        """The tensor that one parameter's weights are kept in: itself, or its average."""
        if self.updates.copies or parameter.dtype == torch.float32:
            return parameter
        if parameter not in self.averages:
            self.averages[parameter] = parameter.detach().to("cpu", torch.float32)
        return self.averages[parameter]
