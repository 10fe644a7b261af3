"""Updates of the reference model from the policy: a copy every few rollout steps, or a moving average.

After every ``--ref-update-interval``-th rollout step its weights become::

    θ_ref ← α · θ + (1 - α) · θ_ref,    α = --ref-update-alpha

Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment" (arXiv 2404.09656): their hard update for
α = 1; for less their soft update, which they make after every step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from miles_async.arguments.algorithm import AlgorithmArguments


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceUpdates:
    """Schedule and weight of the reference model's updates."""

    interval: int  # rollout steps
    alpha: float

    @staticmethod
    def of(arguments: AlgorithmArguments) -> ReferenceUpdates | None:
        """Read the flags; None for a fixed reference."""
        if arguments.ref_update_interval is None:
            return None
        return ReferenceUpdates(interval=arguments.ref_update_interval, alpha=arguments.ref_update_alpha)

    @property
    def copies(self) -> bool:
        """True if the reference becomes a copy of the policy, without an average."""
        return self.alpha == 1

    def due(self, steps: int) -> bool:
        """True if an update is due after this number of rollout steps."""
        return steps % self.interval == 0

    def follow(self, reference: Tensor, policy: Tensor) -> None:
        """Update weights of the reference in place; ``policy`` may have a smaller dtype."""
        if self.copies:
            reference.copy_(policy)
        else:
            reference.lerp_(policy.to(reference), self.alpha)
