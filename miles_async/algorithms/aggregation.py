"""Aggregation of the loss: what an optimizer step's loss is the mean over (``--loss-aggregation``).

A sequence is one branch of a sample: a sample whose history was edited counts once per branch.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.sequences import sum_per_sequence
from miles_async.api import TokenBatch


def token_mean(loss: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Every token that carries loss counts alike (DAPO, arXiv:2503.14476, eq. 8)."""
    return (loss * batch.loss_mask).sum(), batch.loss_mask.count_nonzero()


def sequence_mean(loss: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Every sequence counts alike, and within it every token that carries loss (GRPO, arXiv:2402.03300, eq. 3)."""
    sums = sum_per_sequence(loss * batch.loss_mask, batch.offsets)
    tokens = sum_per_sequence(batch.loss_mask, batch.offsets)
    return (sums / tokens.clamp(min=1)).sum(), tokens.count_nonzero()
