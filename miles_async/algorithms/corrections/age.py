"""Weights by the age of a token: the version that the optimizer steps from − the version that sampled it.

::

    w = token_age_decay^age if age ≤ max_token_age else 0

``--max-weight-staleness`` keeps samples out of the batch by their oldest token; this masks or down-weights single
tokens of a trajectory that several versions wrote. It is a rule of thumb without a derivation: an importance weight
corrects for how far the policy moved, an age only says how often.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class TokenAge:
    """``--max-token-age`` and ``--token-age-decay``."""

    needs = ()

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._oldest, self._decay = arguments.max_token_age, arguments.token_age_decay

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        age = batch.ages.to(logprobs.dtype)
        weight = self._decay**age
        if self._oldest is not None:
            weight = weight.masked_fill(age > self._oldest, 0.0)
        return weight, {"age_weight_mean": weight, "age_masked_fraction": (weight == 0).float()}
