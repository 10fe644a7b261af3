"""Check a sample of any origin before it is rewarded: does it have all that the trainer needs?"""

from __future__ import annotations

import numpy as np

from miles_async.errors import TransientEngineError
from miles_async.staleness.versions import oldest_version
from miles_async.types import Sample

LOWEST_LOGPROB = -1e4
"""No float32 softmax ends below -104. SGLang (0.5) reports the lowest float, -3.4e38, where the probability is 0."""

HIGHEST_LOGPROB = 1e-3
"""Probabilities end at 1; the rest is rounding."""


def check_sample(sample: Sample) -> int:
    """Check the tokens that carry loss, over all branches (C1, C12). Return the oldest of their versions.

    Raises:
        VersionUnknownError: one has no weight version, or there is none.
        TransientEngineError: one has no usable log-prob; the numerics of the engine, or of a Generate, are broken.
    """
    oldest = oldest_version(sample)
    of_branches = [branch.rollout_logprobs[branch.loss_tokens()] for branch in sample.branches]
    logprobs = of_branches[0] if len(of_branches) == 1 else np.concatenate(of_branches)
    lowest, highest = np.minimum.reduce(logprobs), np.maximum.reduce(logprobs)
    if not (lowest >= LOWEST_LOGPROB and highest <= HIGHEST_LOGPROB):  # NaN is neither
        unusable = logprobs[~((logprobs >= LOWEST_LOGPROB) & (logprobs <= HIGHEST_LOGPROB))]
        raise TransientEngineError(
            f"expected a log-prob, at most 0, of every token that carries loss, found {unusable[0]:g} "
            f"({len(unusable)} of {len(logprobs)} tokens): the numerics of the engine, or of a Generate, are broken"
        )
    return oldest
