"""State that changes once per rollout step: a reference model that follows the policy, a KL coefficient that adapts.

All ranks have the same metrics, and so the same coefficient. Both are saved if they change; a checkpoint without them
leaves them as the flags begin them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron.core.dist_checkpointing.mapping import ShardedStateDict

from miles_async.algorithms.objective import Objective
from miles_async.backends.megatron.reference import PREFIX, FollowingReference


@dataclass(frozen=True, kw_only=True, slots=True)
class PerRollout:
    """Updated after each rollout step. Most runs have neither."""

    reference: FollowingReference | None
    objective: Objective

    def update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Follow a rollout step with these metrics over all ranks. Returns further metrics."""
        if self.reference is not None:
            self.reference.after_rollout_step()
        adaptive = self.objective.adaptive
        if adaptive is None:
            return {}
        used = adaptive.value
        adaptive.adapt(metrics.get(self.objective.adapts_to, float("nan")), metrics.get("sequences", 0.0))
        return {"kl_coefficient": used}

    def sharded_state(self) -> ShardedStateDict:
        """Megatron's sharded state, for a checkpoint."""
        state: ShardedStateDict = {}
        if self.reference is not None:
            state |= {"reference": self.reference.sharded_state(), "reference_steps": self.reference.steps}
        if self.objective.adaptive is not None:
            state["kl_coefficient"] = self.objective.adaptive.value
        return state

    def wanted(self, found: Collection[str]) -> ShardedStateDict:
        """What to load of a checkpoint that has these keys, beside plain numbers, which come anyway."""
        has_reference = any(key.startswith(f"{PREFIX}.") for key in found)
        if self.reference is None or not has_reference:
            return {}
        return {"reference": self.reference.sharded_state()}

    def load(self, state: ShardedStateDict) -> None:
        """Continue from what a checkpoint had."""
        if self.reference is not None and "reference" in state:
            self.reference.load(state["reference"], state["reference_steps"])
        if self.objective.adaptive is not None and "kl_coefficient" in state:
            self.objective.adaptive.value = state["kl_coefficient"]
