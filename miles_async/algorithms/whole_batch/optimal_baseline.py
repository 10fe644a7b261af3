"""OPOB: the baseline of a group that gives the off-policy gradient the least variance.

Huang et al., "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs" (VCPO), arXiv:2602.17616. Over the
trajectories τ of a group, with w the product of π / π_rollout over the tokens of τ that carry loss, π the policy before
the batch's first optimizer step::

    b* = Σ w² ‖∇ log π(τ)‖² R / Σ w² ‖∇ log π(τ)‖²,    advantage R - b*

The norm is of the gradient in all trained weights, summed over the tokens; ``backends/megatron`` computes it. As in the
authors' recipes, w is not truncated here, whatever the loss does with its weights, and the advantage is divided by the
deviation of the group's rewards (``--grpo-std-normalization``). Since grpo's advantage A is the reward shifted and
scaled, this equals A minus the same mean of A, and A is what arrives here. Where all norms of a group are 0, b* is the
mean.

The authors' code takes the norm of a gradient that is already weighed by the truncated w, which squares both weights;
here the formula is the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_async.algorithms.sequences import per_token
from miles_async.algorithms.whole_batch.transform import Trajectories, WholeBatch, with_advantages
from miles_async.api import TokenBatch
from miles_async.arguments.algorithm import AlgorithmArguments


class OptimalBaseline:
    """``--advantage-estimator opob``: takes b* from the advantages of samples."""

    needs = ()
    weighs_trajectories = True

    def __init__(self, arguments: AlgorithmArguments) -> None: ...

    def prepare(self, batches: Sequence[TokenBatch], whole: WholeBatch) -> list[TokenBatch]:
        assert whole.trajectories is not None, "the optimal baseline weighs trajectories"
        of_rank = whole.trajectories
        baselines = optimal_baselines(
            Trajectories(
                group_ids=whole.gather(of_rank.group_ids),
                advantages=whole.gather(of_rank.advantages),
                log_weights=whole.gather(of_rank.log_weights),
                squared_norms=whole.gather(of_rank.squared_norms),
            )
        )
        reduced = [
            ((batch.advantages.double() - per_token(baselines[batch.group_ids], batch.offsets)) * batch.loss_mask).to(
                batch.advantages.dtype
            )
            for batch in batches
        ]
        return with_advantages(batches, reduced)


def optimal_baselines(trajectories: Trajectories) -> Tensor:
    """b* of each group, float64 [G]."""
    groups = trajectories.group_ids
    logs = 2.0 * trajectories.log_weights + trajectories.squared_norms.log()
    nothing = logs.new_zeros(int(groups.max()) + 1)
    largest = torch.full_like(nothing, -torch.inf).scatter_reduce(0, groups, logs, "amax")
    # Relative to the largest of the group: a product of thousands of ratios is beyond float64.
    weights = (logs - largest.clamp(min=torch.finfo(logs.dtype).min)[groups]).exp()
    total = nothing.index_add(0, groups, weights)
    weighed = nothing.index_add(0, groups, weights * trajectories.advantages)
    return weighed / total.clamp(min=1.0)  # it is at least 1, or 0
