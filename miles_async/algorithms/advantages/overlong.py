"""DAPO's soft penalty for answers near the length limit.

Yu et al., "DAPO" (arXiv 2503.14476), eq. 13. With L the longest response, B the buffer before it and n the response's
tokens, the reward that advantages are computed from changes by factor times::

    0                   if n ≤ L - B
    (L - B - n) / B     if L - B < n ≤ L
    -1                  if n > L

Recorded rewards and group filters are unaffected. n is of the longest branch, and includes tokens of environments and
tools.
"""

from __future__ import annotations

import msgspec
import numpy as np

from miles_async.api import AdvantageEstimator
from miles_async.arguments.algorithm import AlgorithmArguments
from miles_async.types import Group


def overlong_penalty(lengths: np.ndarray, longest: int, buffer: int) -> np.ndarray:
    """float64 [S] in [-1, 0].

    >>> overlong_penalty(np.array([80.0, 90.0, 100.0, 101.0]), 100, 20)
    array([-0. , -0.5, -1. , -1. ])
    """
    penalties: np.ndarray = -np.clip((lengths - (longest - buffer)) / buffer, 0.0, 1.0)
    return penalties


def with_length_penalty(
    estimator: AdvantageEstimator, arguments: AlgorithmArguments, longest: int
) -> AdvantageEstimator:
    """Let the estimator see shaped rewards, with ``--overlong-buffer-len``. ``longest``: limit of response tokens."""
    buffer, factor = arguments.overlong_buffer_len, arguments.overlong_penalty_factor
    if buffer is None:
        return estimator

    def shaped(group: Group) -> Group:
        lengths = np.array([sample.longest_response for sample in group.samples], dtype=np.float64)
        penalties = factor * overlong_penalty(lengths, longest, buffer)
        samples = [
            msgspec.structs.replace(sample, reward=(sample.reward or 0.0) + float(penalty))
            for sample, penalty in zip(group.samples, penalties, strict=True)
        ]
        return msgspec.structs.replace(group, samples=tuple(samples))

    return lambda groups: estimator([shaped(group) for group in groups])
