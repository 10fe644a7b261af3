"""Values at the level on which a correction works: of single tokens, or of whole sequences."""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.sequences import mean_per_sequence, per_token, sum_of_loss_tokens
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import CorrectionLevel


def at_level(values: Tensor, level: CorrectionLevel, batch: TokenBatch) -> Tensor:
    """[N] → [N]: values of tokens as they are (token), or at each token of a sequence their sum (sequence) or mean
    (geometric: of log-ratios, so that their exponential is a geometric mean) over its tokens that carry loss.
    """
    if level == "token":
        return values
    if level == "geometric":
        return mean_per_sequence(values, batch)
    return per_token(sum_of_loss_tokens(values, batch), batch.offsets)
