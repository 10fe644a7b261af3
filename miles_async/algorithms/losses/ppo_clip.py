"""PPO's clipped surrogate per token, with the dual clip.

For a token with advantage A and ratio r = π / π_old::

    S = min(r · A, clip(r, 1 - eps_clip, 1 + eps_clip_high) · A)
    L = -(max(S, eps_clip_c · A) if A < 0 else S)

- clipped surrogate: Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 7;
- dual clip: Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning" (arXiv 1912.09729),
  eq. 5. PPO's minimum bounds r only from the side that an advantage pushes to: for A < 0 a large r, a token that the
  old policy found unlikely, makes loss and gradient as large as r. Past eps_clip_c the loss stays at eps_clip_c · |A|
  and has no gradient. It bounds r, whatever π_old is, before a correction weighs the loss: with ``--use-tis`` a token's
  loss is at most tis_clip · eps_clip_c · |A|;
- advantages shared by all tokens of a sample: Shao et al., "DeepSeekMath" (arXiv 2402.03300), GRPO;
- a wider upper clip, and the mean over tokens instead of samples: Yu et al., "DAPO" (arXiv 2503.14476), eq. 8;
- π_old: the trainer's policy before its first step on the batch, or, with ``--use-rollout-logprobs``, the engine's that
  sampled the token (as stale as it may be): then the clip itself bounds how far off-policy data moves the policy.
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.losses.surrogate import ClipRange, surrogate_loss
from miles_async.algorithms.ratio import importance_ratio
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class PpoClip:
    """``--policy-loss ppo_clip``."""

    needs = ("old_logprobs",)

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._clip = ClipRange.of(arguments)

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = importance_ratio(logprobs, batch.old_logprobs)
        return surrogate_loss(ratio, self._clip.bounded(ratio), batch.advantages, self._clip.cap)
