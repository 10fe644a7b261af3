"""The critic's loss: squared error of its values, with PPO's clip.

For a token with value V, value V_old before the first optimizer step on the batch, and return R::

    L = 1/2 · max((V - R)², (V_old + clip(V - V_old, -value_clip, value_clip) - R)²)

PPO (arXiv 1707.06347) has the squared error alone, eq. 9. The clip is OpenAI's implementation's (baselines, ppo2),
described in Engstrom et al., "Implementation Matters in Deep Policy Gradients" (arXiv 2005.12729), section 3: a value
that has moved further than value_clip, and not past R, gets no gradient. verl has the same formula, slime omits the
half.

R = A + V_old with A of ``--token-advantages``, before whitening: with GAE the λ-return. ``--loss-aggregation`` applies
as to the policy loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_async.algorithms.objective import LossSums
from miles_async.api import Aggregation, TokenBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """Computes the critic's loss, one micro-batch at a time."""

    aggregation: Aggregation
    clip: float | None  # of values; None: unbounded

    def __call__(self, values: Tensor, returns: Tensor, batch: TokenBatch) -> LossSums:
        """Sums over the tokens of ``batch`` that carry loss. ``values``: float32 [N], with gradient; ``returns``: [N].
        ``batch.values``: from before the first optimizer step.
        """
        loss = (values - returns).square()
        clipped = torch.zeros_like(loss)
        if self.clip is not None:
            moved = (values - batch.values).clamp(-self.clip, self.clip)
            bounded = (batch.values + moved - returns).square()
            clipped = (bounded > loss).to(loss.dtype)
            loss = torch.maximum(loss, bounded)
        total, count = self.aggregation(0.5 * loss, batch)
        metrics = _sums(total, count, clipped, returns, batch)
        return LossSums(loss=total, count=count, metrics=metrics, batch=batch)


@torch.no_grad()
def _sums(total: Tensor, count: Tensor, clipped: Tensor, returns: Tensor, batch: TokenBatch) -> dict[str, Tensor]:
    mask = batch.loss_mask
    returns, errors = returns * mask, (returns - batch.values) * mask
    return {
        "value_loss": total.detach(),
        "value_loss_count": count,
        "value_tokens": mask.sum(),
        "value_clipped": (clipped * mask).sum(),
        "value_sum": (batch.values * mask).sum(),
        "return_sum": returns.sum(),
        "return_squares": returns.double().square().sum(),
        "error_sum": errors.sum(),
        "error_squares": errors.double().square().sum(),
    }


def value_metrics(reduced: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the critic from sums over all ranks and micro-batches; none without a critic.

    The explained variance is 1 - Var(R - V_old) / Var(R) over the tokens of the rollout batch that carry loss: 1 where
    values predict returns exactly, 0 where a constant would do as well, and 0 where all returns are equal.
    """
    if "value_loss" not in reduced:
        return {}
    tokens = max(reduced["value_tokens"], 1.0)
    spread = reduced["return_squares"] / tokens - (reduced["return_sum"] / tokens) ** 2
    unexplained = reduced["error_squares"] / tokens - (reduced["error_sum"] / tokens) ** 2
    # Rounding leaves something of a variance of 0.
    explained = 1.0 - unexplained / spread if spread > 1e-12 * reduced["return_squares"] / tokens else 0.0
    return {
        "value_loss": reduced["value_loss"] / max(reduced["value_loss_count"], 1.0),
        "value_clip_fraction": reduced["value_clipped"] / tokens,
        "value_mean": reduced["value_sum"] / tokens,
        "return_mean": reduced["return_sum"] / tokens,
        "explained_variance": explained,
    }
