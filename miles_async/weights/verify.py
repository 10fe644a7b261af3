"""Does an engine hold the weights that the trainer sent? The canary: one fixed sequence, scored by both."""

from __future__ import annotations

import math
import random

from miles_async.types import CanaryScore, StagedWeights

CANARY_LENGTH = 32


def canary_tokens(vocab_size: int, length: int = CANARY_LENGTH, seed: int = 0) -> tuple[int, ...]:
    """A fixed random sequence: it visits every layer and an arbitrary slice of the embeddings."""
    draw = random.Random(seed)
    return tuple(draw.randrange(vocab_size) for _ in range(length))


def default_tolerance(bf16: bool) -> float:
    """Largest log-prob difference between two correct implementations of the same weights."""
    return 0.15 if bf16 else 1e-3


def disagreement(staged: StagedWeights, score: CanaryScore, tolerance: float) -> str | None:
    """Why ``score`` cannot come from the staged weights, or None if it can."""
    if score.weight_version != str(staged.version):
        return f"reports weight version {score.weight_version!r}, expected {staged.version}"
    difference = max_difference(staged, score)
    if difference > tolerance:
        return f"canary log-probs differ by {difference:.3g}, tolerance {tolerance:g} (--canary-tolerance)"
    return None


def max_difference(staged: StagedWeights, score: CanaryScore) -> float:
    """Largest |engine − trainer| over the canary's log-probs; infinite if the lengths differ or one is NaN."""
    if len(score.logprobs) != len(staged.canary_logprobs):
        return math.inf
    differences = (abs(a - b) for a, b in zip(score.logprobs, staged.canary_logprobs, strict=True))
    return max(math.inf if math.isnan(difference) else difference for difference in differences)
