"""State that changes once per rollout step: a reference model that follows the policy, an adaptive KL coefficient.

All ranks have the same metrics, and so the same coefficient. Both are saved if they change, as is the number of rollout
steps; a checkpoint without them leaves their initial values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.utils import unwrap_model
from torch import Tensor

from miles_async.algorithms.objective import Objective
from miles_async.algorithms.reference_updates import ReferenceUpdates
from miles_async.backends.megatron.model.build import LoadedModel, load_model
from miles_async.backends.megatron.model.forward import Pipeline
from miles_async.backends.megatron.optimizer import Training

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

PREFIX = "reference"


def load_reference(
    directory: Path | None, initial: Path, policy: LoadedModel, training: Training, updates: ReferenceUpdates | None
) -> tuple[Pipeline, FollowingReference | None]:
    """Load the frozen reference model, and what follows the policy if there are ``updates``. Collective.

    ``directory``: None: the ``initial`` weights of the policy, which a policy with adapters holds itself.
    """
    if policy.adapted and directory is None:
        return policy.without_adapters(training.device), None
    frozen = load_model(directory or initial, training.model, training.platform, trainable=False)
    following = None
    if updates is not None:
        following = FollowingReference(modules=frozen.modules, policy=policy.modules, updates=updates)
    return frozen.pipeline(training.device), following


@dataclass(kw_only=True, slots=True)
class PerRollout:
    """Updated after each rollout step. Most runs have neither."""

    reference: FollowingReference | None
    objective: Objective
    epochs: int  # times that a rollout step's sequences are in its metrics
    steps: int = 0  # rollout steps so far

    def update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Follow a rollout step with these metrics over all ranks. Returns further metrics."""
        self.steps += 1
        if self.reference is not None:
            self.reference.after_rollout_step(self.steps)
        adaptive = self.objective.adaptive
        if adaptive is None:
            return {}
        used = adaptive.value
        adaptive.adapt(metrics.get(self.objective.adapts_to, float("nan")), metrics.get("sequences", 0.0) / self.epochs)
        return {"kl_coefficient": used}

    def sharded_state(self) -> ShardedStateDict:
        """Megatron's sharded state, for a checkpoint."""
        state: ShardedStateDict = {"rollout_steps": self.steps}
        if self.reference is not None:
            state["reference"] = self.reference.sharded_state()
        if self.objective.adaptive is not None:
            state["kl_coefficient"] = self.objective.adaptive.value
        return state

    def wanted(self, found: Collection[str]) -> ShardedStateDict:
        """Return what to load from a checkpoint with these keys, besides plain numbers, which are always loaded."""
        has_reference = any(key.startswith(f"{PREFIX}.") for key in found)
        if self.reference is None or not has_reference:
            return {}
        return {"reference": self.reference.sharded_state()}

    def load(self, state: ShardedStateDict) -> None:
        """Restore from a checkpoint's state."""
        self.steps = state["rollout_steps"]
        if self.reference is not None and "reference" in state:
            self.reference.load(state["reference"])
        if self.objective.adaptive is not None and "kl_coefficient" in state:
            self.objective.adaptive.value = state["kl_coefficient"]


@dataclass(kw_only=True, slots=True)
class FollowingReference:
    """The frozen reference model of this rank, which follows the policy.

    An average of weights in fewer bits than fp32 is kept in fp32 on the host: rounding would swallow small changes.
    """

    modules: Sequence[Module]
    policy: Sequence[Module]  # the same, trained
    updates: ReferenceUpdates
    averages: dict[Parameter, Tensor] = field(default_factory=dict)  # fp32, of parameters in fewer bits

    @torch.no_grad()
    def after_rollout_step(self, step: int) -> None:
        """Follow the policy if an update is due after so many rollout steps."""
        if not self.updates.due(step):
            return
        policy = [dict(unwrap_model(module).named_parameters()) for module in self.policy]
        for index, name, parameter in self._parameters():
            kept = self._kept(parameter)
            self.updates.follow(kept, policy[index][name])
            if kept is not parameter:
                parameter.copy_(kept)

    def sharded_state(self) -> ShardedStateDict:
        """Megatron's sharded state of the weights, prefixed with ``reference``."""
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
    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore a saved :meth:`sharded_state`."""
        for index, name, parameter in self._parameters():
            found = state[f"{index}"][name]
            self._kept(parameter).copy_(found)
            parameter.copy_(found)

    def _parameters(self) -> Iterator[tuple[int, str, Parameter]]:
        for index, module in enumerate(self.modules):
            for name, parameter in unwrap_model(module).named_parameters():
                yield index, name, parameter

    def _kept(self, parameter: Parameter) -> Tensor:
        """The tensor that holds a parameter's reference weights: itself, or its fp32 average."""
        if self.updates.copies or parameter.dtype == torch.float32:
            return parameter
        if parameter not in self.averages:
            self.averages[parameter] = parameter.detach().to("cpu", torch.float32)
        return self.averages[parameter]
