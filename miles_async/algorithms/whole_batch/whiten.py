"""Whitened advantages: mean 0 and variance 1 over the tokens of a rollout batch that carry loss.

::

    A ← (A - mean) / sqrt(variance + 1e-8),    variance with the number of tokens in the denominator

Hu et al., "REINFORCE++" (arXiv 2501.03262), global advantage normalization. The paper leaves the denominator of the
variance and the 1e-8 open; both are OpenRLHF's, of its authors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles_async.algorithms.whole_batch.transform import WholeBatch, with_advantages
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments

EPSILON = 1e-8


class Whiten:
    """``--normalize-advantages``."""

    needs = ()
    weighs_trajectories = False

    def __init__(self, arguments: AlgorithmArguments) -> None: ...

    def prepare(self, batches: Sequence[TokenBatch], whole: WholeBatch) -> list[TokenBatch]:
        sums = [
            torch.stack([(batch.advantages.double() ** power * batch.loss_mask.double()).sum() for power in (0, 1, 2)])
            for batch in batches
        ]
        count, total, squares = whole.gather(torch.stack(sums).sum(0)).view(-1, 3).sum(0)
        mean = total / count.clamp(min=1)
        variance = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
        scale = torch.rsqrt(variance + EPSILON)
        whitened = [
            ((batch.advantages.double() - mean) * scale * batch.loss_mask.double()).to(batch.advantages.dtype)
            for batch in batches
        ]
        return with_advantages(batches, whitened)
