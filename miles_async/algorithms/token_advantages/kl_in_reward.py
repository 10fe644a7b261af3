"""The KL to the reference model as a part of the reward, token by token, instead of a loss beside it.

Token t costs kl_coef · (log π_old - log π_ref): its advantage is that of its sample, minus what it and the later tokens
of its sequence that carry loss cost. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv
1909.08593), eq. 2, with the sum to go of REINFORCE (Williams 1992) and no discount. The mean of log π - log π_ref over
samples of π is the KL, and in a reward its gradient is unbiased, which is why it is k1 whatever ``--kl-loss-type``.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.kl import k1
from miles_async.algorithms.sequences import sum_to_go
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class KlInReward:
    """``--token-advantages kl_in_reward``."""

    needs = ("old_logprobs", "ref_logprobs")

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._coefficient = arguments.kl_coef

    def __call__(self, batch: TokenBatch) -> Tensor:
        cost = self._coefficient * k1(batch.old_logprobs, batch.ref_logprobs) * batch.loss_mask
        return batch.advantages - sum_to_go(cost, batch.offsets)
