"""Supervised fine-tuning: the cross entropy of given answers.

::

    L = -log π

at each token of an answer, so that the loss of an optimizer step is the mean negative log-likelihood (Brown et al.,
"Language Models are Few-Shot Learners", arXiv 2005.14165, section 2; Ouyang et al., arXiv 2203.02155, section 3.5).
Nothing was sampled: there are neither ratios nor advantages, nor is anything off-policy.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.api import Need, TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class SftLoss:
    """``--loss-type sft_loss``."""

    needs: tuple[Need, ...] = ()

    def __init__(self, arguments: AlgorithmArguments) -> None:
        pass

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs, {}
