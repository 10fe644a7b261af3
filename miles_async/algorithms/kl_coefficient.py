"""The weight of the KL to the reference model: constant, or adapted so that the KL stays near a target.

After each rollout step, with the mean KL of its tokens and n sequences trained::

    e = clip(KL / kl_target - 1, -0.2, 0.2)
    β ← β · (1 + e · n / kl_horizon)

Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2.2, where the factor
of e is 0.1 per batch; the paper's code (lm-human-preferences) and verl have n / kl_horizon. The paper's targets are for
the KL summed over an answer; here and in verl it is a mean over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from miles_async.api import TokenBatch

MOST = 0.2


@dataclass(kw_only=True, slots=True)
class KlCoefficient:
    """The current β."""

    value: float
    target: float | None  # nats per token; None: β is constant
    horizon: int  # sequences

    def adapt(self, kl: float, sequences: float) -> None:
        """Adapt β after a rollout step with this mean KL; a KL that is not finite changes nothing."""
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -MOST), MOST)
            self.value *= 1.0 + error * sequences / self.horizon


@runtime_checkable
class KlInAdvantages(Protocol):
    """Advantages of tokens that include a KL, with its weight."""

    coefficient: KlCoefficient

    def divergence(self, batch: TokenBatch) -> Tensor:
        """The KL of each token, [N]."""
        ...
