"""Bounded importance weights between the policy that sampled and the policy that ratios compare with.

With w = π_old / π_rollout, per token, as the product over a sequence, or as the geometric mean of its tokens
(``--tis-level``), and the bounds l = tis_clip_low and h = tis_clip::

    truncate    clip(w, l, h)
    mask        w if l ≤ w ≤ h else 0

- truncate per token: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), after
  Ionides, "Truncated Importance Sampling" (2008); its l is 0;
- mask per token: IcePop, Ling Team, "Every Step Evolves" (arXiv 2510.18855), with l = 0.5 and h = 5;
- per sequence and its geometric mean: Liu et al., "When Speed Kills Stability" (2025), masked as in
  miles' examples/infra_features/train_infer_mismatch_helper.

With ``--policy-loss ppo_clip`` and π_old the trainer's policy this is decoupled PPO: Hilton et al., "Batch
Size-Invariance for Policy Optimization" (arXiv 2110.00641), and Fu et al., "AReaL" (arXiv 2505.24298).
"""

from __future__ import annotations

from torch import Tensor

from miles_async.algorithms.ratio import bounded_exp
from miles_async.algorithms.sequences import at_level
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class Truncate:
    """``--tis-mode truncate``."""

    needs = ("old_logprobs",)

    def __init__(self, arguments: AlgorithmArguments) -> None:
        self._low, self._high, self._level = arguments.tis_clip_low, arguments.tis_clip, arguments.tis_level

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = bounded_exp(at_level(batch.old_logprobs - batch.rollout_logprobs, self._level, batch))
        weight = self._bounded(ratio)
        metrics = {
            "tis_weight_mean": weight,
            "tis_weight_max": weight,
            "tis_capped_fraction": (weight != ratio).float(),
            "tis_masked_fraction": (weight == 0).float(),
        }
        return weight, metrics

    def _bounded(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(self._low, self._high)


class Mask(Truncate):
    """``--tis-mode mask``."""

    def _bounded(self, ratio: Tensor) -> Tensor:
        return ratio.masked_fill((ratio < self._low) | (ratio > self._high), 0.0)
