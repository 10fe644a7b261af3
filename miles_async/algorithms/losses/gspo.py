"""GSPO: PPO's clipped surrogate with one ratio per sequence.

Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071). The ratio of a sequence y is the geometric mean
over its |y| tokens that carry loss (eq. 7)::

    s = (π(y) / π_old(y))^(1 / |y|) = exp(mean over t of (log π_t - log π_old,t))

Here in the form of GSPO-token (eq. 13, 14), whose ratio at token t is sg(s) · π_t / sg(π_t), with sg for "no gradient".
Where all tokens of a sequence have one advantage, value and gradient are GSPO's (eq. 5); they may also differ.
The paper's mean is over sequences (``--loss-aggregation sequence_mean``), and its clip is narrow (eps_clip 3e-4,
eps_clip_high 4e-4), since a mean over tokens moves little. The dual clip is not in the paper: ``--eps-clip-c none``
leaves it out.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.losses.ppo_clip import PpoClip
from miles_async.algorithms.ratio import bounded_difference
from miles_async.algorithms.sequences import mean_per_sequence
from miles_async.api import TokenBatch


class Gspo(PpoClip):
    """``--policy-loss gspo``."""

    def _ratio_of(self, logprobs: Tensor, batch: TokenBatch) -> Tensor:
        return sequence_log_ratio(logprobs, batch.old_logprobs, batch).exp()


def sequence_log_ratio(logprobs: Tensor, old: Tensor, batch: TokenBatch) -> Tensor:
    """Logarithm of GSPO-token's ratio, [N]: the sequence's value at each of its tokens, with the token's gradient."""
    value = mean_per_sequence(bounded_difference(logprobs.detach(), old), batch)
    return value + (logprobs - logprobs.detach())
