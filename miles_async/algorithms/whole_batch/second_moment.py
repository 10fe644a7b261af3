"""M2PO: masks the tokens whose ratios are furthest from 1, until the second moment of the rest is small.

Zheng et al., "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?" (arXiv 2510.01161).
With d = log π_old - log π_rollout of each token, the largest number of tokens is kept, those with the smallest d², for
which::

    mean of d² over the tokens kept < m2_threshold

and the others get no gradient. Tokens are chosen once per rollout batch, before its first optimizer step. This is the
mask of AReaL (areal/trainer/ppo/actor.py), over the rollout batch instead of a micro-batch, so that packing and ranks
don't change it; where no token is below the threshold, none is kept. Tokens of equal d² are kept or masked together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_async.algorithms.whole_batch.transform import WholeBatch, with_advantages
from miles_async.api import Need, TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class WithinSecondMoment:
    """``--m2-threshold``."""

    needs: tuple[Need, ...] = ("old_logprobs",)
    weighs_trajectories = False

    def __init__(self, arguments: AlgorithmArguments) -> None:
        assert arguments.m2_threshold is not None
        self._threshold = arguments.m2_threshold

    def prepare(self, batches: Sequence[TokenBatch], whole: WholeBatch) -> list[TokenBatch]:
        moments = [(batch.old_logprobs - batch.rollout_logprobs).double().square() for batch in batches]
        carrying = [of_batch[batch.loss_mask != 0] for of_batch, batch in zip(moments, batches, strict=True)]
        largest = _largest_kept(whole.gather(torch.cat(carrying)), self._threshold)
        masked = [
            batch.advantages.masked_fill(of_batch > largest, 0.0)
            for of_batch, batch in zip(moments, batches, strict=True)
        ]
        return with_advantages(batches, masked)


def _largest_kept(moments: Tensor, threshold: float) -> Tensor:
    """The largest of the moments kept, -1 if none is."""
    # On the host: CUDA refuses cumsum of floats in deterministic mode.
    ascending, counts = torch.unique(moments.cpu(), return_counts=True)
    means = (ascending * counts).cumsum(0) / counts.cumsum(0)
    kept = ascending[means < threshold]  # means of ascending numbers ascend
    return kept[-1] if len(kept) else moments.new_tensor(-1.0)
