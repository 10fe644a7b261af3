"""Entropy bonus, which keeps the policy exploring.

c times the mean of H(π) over tokens is subtracted from the loss, H of the whole distribution that a token is drawn
from: Williams and Peng, "Function Optimization Using Connectionist Reinforcement Learning Algorithms" (1991); Schulman
et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 9. c moves linearly over the optimizer steps
of the run from ``--entropy-coef`` to ``--entropy-coef-end``; the papers keep it constant.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles_async.arguments.algorithm import AlgorithmArguments


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBonus:
    """The coefficient and its schedule."""

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
