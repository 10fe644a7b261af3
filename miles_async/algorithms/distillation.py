"""On-policy distillation: a token's reward is how much likelier a teacher finds it than the student.

The reverse KL to a teacher π_T at the sampled tokens is added to their advantages (``--use-opd``)::

    A ← A - opd_kl_coef · (log π - log π_T)

Agarwal et al., "On-Policy Distillation of Language Models" (arXiv 2306.13649), with the reverse KL; Lu et al.,
"On-Policy Distillation" (Thinking Machines Lab, 2025), with a discount of 0, as here. π_T is the teacher's distribution
at temperature 1. Neither π_T nor π has a gradient here.

``--opd-student`` chooses π. trainer: the policy at the optimizer step, since Kang et al., "AsyncOPD" (arXiv
2606.24143), recompute the reverse KL under the current student where samples are stale. rollout: the policy that
sampled the token. They are equal where nothing is stale. The KL is added after whitening (``--normalize-advantages``),
so that the unit of its coefficient remains 1 per nat.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.api import Need, TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class Distillation:
    """``--use-opd``."""

    needs: tuple[Need, ...] = ("teacher_logprobs",)

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._coefficient, self._current = arguments.opd_kl_coef, arguments.opd_student == "trainer"

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return advantages that include the teacher's, and metrics, each [N]. ``logprobs``: without gradient."""
        student = logprobs if self._current else batch.rollout_logprobs
        reverse_kl = (student - batch.teacher_logprobs) * batch.loss_mask
        return batch.advantages - self._coefficient * reverse_kl, {"opd_reverse_kl": reverse_kl}
