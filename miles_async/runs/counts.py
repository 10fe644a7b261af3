"""Numbers of steps, from epochs and shares of the run, which only the number of prompts decides."""

from __future__ import annotations

from dataclasses import replace

from miles_async.arguments import Arguments
from miles_async.errors import ConfigurationError


def with_counts(arguments: Arguments) -> Arguments:
    """The arguments, which are valid, with ``--num-rollout`` in place of ``--num-epoch``, and with iterations in place
    of fractions of warm-ups. Raises ConfigurationError, DataError.
    """
    rollout = arguments.rollout
    if arguments.evaluation.eval_only:
        return arguments
    if rollout.num_epoch is not None:
        steps = _steps(arguments, rollout.num_epoch)
        arguments = replace(arguments, rollout=replace(rollout, num_rollout=steps, num_epoch=None))
    optimizer, critic, total = arguments.optimizer, arguments.critic, arguments.optimizer_steps
    if (share := optimizer.lr_warmup_fraction) is not None:
        optimizer = replace(optimizer, lr_warmup_iters=int(share * total), lr_warmup_fraction=None)
    if (share := critic.critic_lr_warmup_fraction) is not None:
        critic = replace(critic, critic_lr_warmup_iters=int(share * total), critic_lr_warmup_fraction=None)
    return replace(arguments, optimizer=optimizer, critic=critic)


def _steps(arguments: Arguments, epochs: int) -> int:
    from miles_async.prompts.rows import PromptRows

    rows, batch = len(PromptRows(arguments.data)), arguments.rollout.rollout_batch_size
    if epochs * rows < batch:
        raise ConfigurationError(
            f"--num-epoch {epochs}: {epochs} × {rows} prompts do not fill one --rollout-batch-size {batch}: lower "
            "that, or give --num-rollout"
        )
    return epochs * rows // batch
