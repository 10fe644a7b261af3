"""Does an engine hold the weights that the trainer sent?

The canary: one fixed sequence, scored by both. Digests: of every tensor, element by element, where the engine holds it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from miles_async.protocols import HeldWeights
from miles_async.tensor_digest import total
from miles_async.types import CanaryScore, HeldPart, StagedWeights, TensorMeta

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


def digest_disagreement(staged: StagedWeights, held: HeldWeights, *, skip: Sequence[str] = ()) -> str | None:
    """Which of the staged tensors an engine holds otherwise, and how; None if it holds all of them as staged.

    ``skip``: parts of names that are not compared (``--verify-weights-skip``).
    """
    compared = [
        meta for bucket in staged.buckets.values() for meta in bucket if not any(part in meta.name for part in skip)
    ]
    wrong = {meta.name: found for meta in compared if (found := _wrong(meta, held.get(meta.name, ())))}
    if not wrong:
        return None
    name, found = next(iter(wrong.items()))
    more = f" (and {len(wrong) - 1} of {len(compared)} more tensors)" if len(wrong) > 1 else ""
    return (
        f"weights differ: {name} {found}{more}. An engine that keeps weights in another form than it is sent "
        "(quantized, reordered for a kernel) can't be compared: --verify-weights-skip, or --verify-weights canary"
    )


def _wrong(meta: TensorMeta, parts: Sequence[HeldPart]) -> str | None:
    """What is wrong with ``parts`` of the tensor. Parts that several ranks hold have to be alike."""
    if casts := {part.dtype for part in parts} - {meta.dtype}:
        return f"was sent as {meta.dtype} and is held as {', '.join(sorted(casts))}"
    digests: dict[tuple[int, tuple[int, ...], tuple[int, ...]], set[str]] = {}
    for part in parts:
        digests.setdefault((part.offset, part.shape, part.strides), set()).add(part.digest)
    elements = sum(math.prod(shape) for _, shape, _ in digests)
    if elements != math.prod(meta.shape):
        return f"has {math.prod(meta.shape)} elements, of which {elements} are held"
    if any(len(alike) > 1 for alike in digests.values()):
        return "is not the same on all ranks that hold it"
    if total(digest for [digest] in digests.values()) != meta.digest:
        return "has other elements than were sent"
    return None
