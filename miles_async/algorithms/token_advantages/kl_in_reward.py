"""The KL to the reference model as part of the reward of each token, instead of a loss.

Token t costs kl_coef · KL_t, an estimate (``--kl-reward-type``) from log π_old and log π_ref. Its advantage is its
sample's, minus the cost of itself and of later tokens of its sequence that carry loss. Ziegler et al., "Fine-Tuning
Language Models from Human Preferences" (arXiv 1909.08593), eq. 2, with the sum to go of REINFORCE (Williams 1992) and
no discount. There the estimate is k1, whose mean over samples of π is the KL: in a reward its gradient is unbiased.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.coefficients import KlCoefficient
from miles_async.algorithms.registry import reward_kl_estimator
from miles_async.algorithms.sequences import sum_to_go
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class KlInReward:
    """``--token-advantages kl_in_reward``."""

    needs = ("old_logprobs", "ref_logprobs")

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self.coefficient = KlCoefficient(
            value=arguments.kl_coef, target=arguments.kl_target, horizon=arguments.kl_horizon
        )
        self._estimate = reward_kl_estimator(arguments)

    def divergence(self, batch: TokenBatch) -> Tensor:
        """The KL of each token, [N]."""
        return self._estimate(batch.old_logprobs, batch.ref_logprobs)

    def __call__(self, batch: TokenBatch) -> Tensor:
        cost = self.coefficient.value * self.divergence(batch) * batch.loss_mask
        return batch.advantages - sum_to_go(cost, batch.offsets)
