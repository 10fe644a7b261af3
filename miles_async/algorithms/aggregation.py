"""Aggregation of token losses into the loss of an optimizer step (``--loss-aggregation``).

A sequence is a branch of a sample: a sample whose history was edited counts once per branch.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.sequences import loss_tokens, sum_of_loss_tokens
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


def token_mean(loss: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Every token that carries loss counts alike (DAPO, arXiv:2503.14476, eq. 8)."""
    return (loss * batch.loss_mask).sum(), batch.loss_mask.count_nonzero()


def sequence_mean(loss: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Every sequence counts alike, and within it every token that carries loss (GRPO, arXiv:2402.03300, eq. 3)."""
    tokens = loss_tokens(batch)
    return (sum_of_loss_tokens(loss, batch) / tokens.clamp(min=1)).sum(), tokens.count_nonzero()


class SequenceSum:
    """Every sequence counts by its length: the mean over sequences of the sum over their tokens, divided by a constant
    (Dr. GRPO, "Understanding R1-Zero-Like Training", arXiv:2503.20783, whose constant is the longest response).
    """

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._length = arguments.loss_length_normalizer or 1

    def __call__(self, loss: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        return (loss * batch.loss_mask).sum() / self._length, loss_tokens(batch).count_nonzero()
