"""Coefficients that change during a run: of the entropy bonus, and of the KL to the reference model.

Entropy bonus, which keeps the policy exploring: c times the mean of H(π) over tokens is subtracted from the loss, H of
the whole distribution that a token is drawn from: Williams and Peng, "Function Optimization Using Connectionist
Reinforcement Learning Algorithms" (1991); Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv
1707.06347), eq. 9. c moves linearly over the optimizer steps of the run from ``--entropy-coef`` to
``--entropy-coef-end``; the papers keep it constant.

KL: constant, or adapted so that the KL stays near a target. After each rollout step, with the mean KL of its tokens and
n sequences trained::

    e = clip(KL / kl_target - 1, -0.2, 0.2)
    β ← β · (1 + e · n / kl_horizon)

Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2.2, where the factor
of e is 0.1 per batch; the paper's code (lm-human-preferences) and verl have n / kl_horizon. The paper's targets are for
the KL summed over an answer; here and in verl it is a mean over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from miles_async.arguments.algorithm import AlgorithmArguments

MOST = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBonus:
    """The entropy coefficient and its schedule."""

    begin: float
    end: float

    @staticmethod
    def of(arguments: AlgorithmArguments) -> EntropyBonus | None:
        """Read the bonus from the flags; None if there is none."""
        begin, end = arguments.entropy_coef, arguments.entropy_coef_end
        end = begin if end is None else end
        return EntropyBonus(begin=begin, end=end) if begin or end else None

    def coefficient(self, progress: float) -> float:
        """``progress``: share of the run's optimizer steps made so far; more than 1 counts as 1."""
        return self.begin + (self.end - self.begin) * min(progress, 1.0)


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
