"""A reference model that follows the policy every few rollout steps: as a copy, or as a moving average.

After every ``--ref-update-interval``-th rollout step its weights become::

    θ_ref ← α · θ + (1 - α) · θ_ref,    α = --ref-update-alpha

Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment" (arXiv 2404.09656): eq. 1 for α < 1, eq. 2 for
α = 1. Averages are kept in fp32 on the host where the model is in fewer bits, which would round small changes away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.utils import unwrap_model
from torch import Tensor

from miles_async.algorithms.objective import ReferenceUpdates

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
        if self.steps % self.updates.interval:
            return
        policy = [dict(unwrap_model(module).named_parameters()) for module in self.policy]
        for index, name, parameter in self._parameters():
            target = policy[index][name]
            if self.updates.alpha == 1:
                parameter.copy_(target)
                continue
            average = self._average(parameter)
            average.lerp_(target.to(average), self.updates.alpha)
            parameter.copy_(average)

    def sharded_state(self) -> dict[str, Any]:
        """Megatron's sharded state of the weights, under names of their own."""
        sharded = [module.sharded_state_dict() for module in self.modules]  # type: ignore[operator]
        return {
            f"{index}": {
                name: make_sharded_optimizer_tensor(sharded[index][name], self._kept(parameter), PREFIX)
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
        """The tensor that weights of one parameter are kept in."""
        return parameter.data if self.updates.alpha == 1 else self._average(parameter)

    def _average(self, parameter: Parameter) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter.data
        if parameter not in self.averages:
            self.averages[parameter] = parameter.detach().to("cpu", torch.float32)
        return self.averages[parameter]
