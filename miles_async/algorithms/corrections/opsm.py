"""OPSM: masks bad samples that the policy has moved away from.

DeepSeek-AI, "DeepSeek-V3.2" (arXiv 2512.02556), off-policy sequence masking. A token of a sequence with
KL = mean(log π_rollout - log π) over its tokens that carry loss gets::

    w = 0 if A < 0 and KL > opsm_delta else 1

π_rollout is what the engine reported, so staleness and the difference between engine and trainer both count; π is the
policy at the optimizer step.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.sequences import mean_per_sequence
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class Opsm:
    """``--use-opsm``."""

    needs = ()

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._delta = arguments.opsm_delta

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        divergence = mean_per_sequence(batch.rollout_logprobs - logprobs, batch)
        masked = (batch.advantages < 0) & (divergence > self._delta)
        return (~masked).to(divergence.dtype), {"opsm_masked_fraction": masked.float()}
