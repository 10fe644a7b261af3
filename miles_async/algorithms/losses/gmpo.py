"""GMPO: the geometric mean of a sequence's ratios, each of them clipped.

Zhao et al., "Geometric-Mean Policy Optimization" (arXiv 2507.20673). For a token with advantage A and log-ratio
d = log π - log π_old, clipped in log space and only on the side that the advantage pushes to::

    c = min(d, eps_clip_high) if A ≥ 0 else max(d, -eps_clip)
    L = -A · exp(mean of c over the tokens of the sequence that carry loss)

The paper's mean is over sequences (``--loss-aggregation sequence_mean``), and its range is wide: ratios in
[exp(-0.4), exp(0.4)], ``--eps-clip 0.4``. It has one advantage per sequence; where tokens differ, each has its own sign
for the clip and its own A before the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_async.algorithms.losses.ppo_clip import epsilons
from miles_async.algorithms.ratio import bounded_difference
from miles_async.algorithms.sequences import mean_per_sequence
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class Gmpo:
    """``--policy-loss gmpo``."""

    needs = ("old_logprobs",)

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._below, self._above = epsilons(arguments)

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        difference = bounded_difference(logprobs, batch.old_logprobs)
        clipped = torch.where(
            batch.advantages < 0, difference.clamp(min=-self._below), difference.clamp(max=self._above)
        )
        ratio = mean_per_sequence(clipped, batch).exp()
        metrics = {"clip_fraction": (clipped != difference).float(), "ratio_mean": ratio, "ratio_max": ratio}
        return -batch.advantages * ratio, metrics
