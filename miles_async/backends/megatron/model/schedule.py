"""The learning rate of each optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from miles_async.arguments.optimizer import OptimizerArguments

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


def make_schedule(
    optimizer: MegatronOptimizer, arguments: OptimizerArguments, total_steps: int
) -> OptimizerParamScheduler:
    """Make the learning-rate schedule of ``total_steps`` optimizer steps; a warm-up takes no more than those.

    It is stepped *before* the optimizer, so that step k of the warm-up has k / warm-up of the peak rate and none is
    wasted at rate 0.
    """
    warm_up = min(arguments.lr_warmup_iters, total_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=arguments.lr,
        min_lr=min(arguments.min_lr, arguments.lr),
        lr_warmup_steps=warm_up,
        # Megatron wants the decay to outlast the warm-up, which short runs need not do.
        lr_decay_steps=max(total_steps, warm_up + 1),
        lr_decay_style=arguments.lr_decay_style,
        start_wd=arguments.weight_decay,
        end_wd=arguments.weight_decay,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
        # A resumed run may have other flags (a longer --num-rollout, say): the flags win.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
