"""KL-Cov: a KL penalty for the tokens that take most of the policy's entropy, instead of a clip.

Cui et al. (arXiv 2505.22617), eq. 14. For a token with advantage A and log-ratio d = log π - log π_old::

    L = -A · exp(d) + ppo_kl_coef · |d|    for the tokens of the rollout batch with the largest covariance
    L = -A · exp(d)                        for the others

kl_cov_ratio of a batch's tokens are penalized (``whole_batch.covariance``). The paper's penalty is KL(π_old ‖ π); |d|
is the estimate of it in its authors' code. There is no clip: eps_clip has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from miles_async.algorithms.ratio import bounded_difference
from miles_async.algorithms.whole_batch.covariance import largest
from miles_async.algorithms.whole_batch.gather import Gather
from miles_async.api import Need, TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class KlCov:
    """``--policy-loss kl_cov``."""

    needs: tuple[Need, ...] = ("old_logprobs", "surveyed")

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._ratio, self._coefficient = arguments.kl_cov_ratio, arguments.ppo_kl_coef

    def survey(self, batches: Sequence[TokenBatch], gather: Gather) -> list[Tensor]:
        """1 at the chosen tokens, else 0; see ``whole_batch.transform.Surveys``."""
        return largest(batches, self._ratio, gather)

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        difference = bounded_difference(logprobs, batch.old_logprobs)
        ratio, penalty = difference.exp(), self._coefficient * difference.abs()
        metrics = {"ratio_mean": ratio, "ratio_max": ratio, "cov_chosen_fraction": batch.surveyed}
        return batch.surveyed * penalty - batch.advantages * ratio, metrics
