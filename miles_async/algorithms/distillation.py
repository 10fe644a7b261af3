"""On-policy distillation: each token is rewarded by how much likelier a teacher finds it than the student does.

The reverse KL from a teacher π_T, at the tokens that the student sampled, as a part of their advantages, whatever the
others are (``--use-opd``)::

    A ← A - opd_kl_coef · (log π - log π_T)

Agarwal et al., "On-Policy Distillation of Language Models" (arXiv 2306.13649), with the reverse KL; Lu et al.,
"On-Policy Distillation" (Thinking Machines Lab, 2025), whose discount is 0, as here: a token answers for itself alone.
π_T is that of its own distribution at temperature 1, without gradient.

π, without gradient, too, by ``--opd-student``. trainer: the policy that is trained, as it is at the optimizer step;
Kang et al., "AsyncOPD" (arXiv 2606.24143), recompute the reverse KL under the current student where samples are stale.
rollout: the policy that sampled the token. Both are one where nothing is stale. The KL comes after whitening
(``--normalize-advantages``), so that its coefficient keeps its unit: 1 per nat.
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
        """Return the advantage of each token with that of the teacher, and metrics, [N]. ``logprobs``: no gradient."""
        student = logprobs if self._current else batch.rollout_logprobs
        reverse_kl = (student - batch.teacher_logprobs) * batch.loss_mask
        return batch.advantages - self._coefficient * reverse_kl, {"opd_reverse_kl": reverse_kl}
