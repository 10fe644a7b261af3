"""The critic of ``--token-advantages gae``: its training, and what its flags mean together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from miles_async.arguments.flag import flag

if TYPE_CHECKING:
    from miles_async.arguments import Arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticArguments:
    """Critic"""

    critic_lr: float | None = flag(None, "peak learning rate of the critic (default: --lr)")
    critic_lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up of the critic's learning rate")
    value_clip: float | None = flag(
        0.2, "how far a value may move from where it was before the batch's first optimizer step; none: no bound"
    )
    critic_updates_per_step: int = flag(1, "optimizer steps of the critic, on the same returns, per one of the policy")
    num_critic_only_steps: int = flag(0, "rollout steps at the beginning that train the critic alone")
    critic_hf_checkpoint: Path | None = flag(
        None, "language model whose layers the critic begins with (default: --hf-checkpoint); its values begin at 0"
    )


def check_critic(arguments: Arguments) -> Iterator[str]:
    """The critic's flags are given with a critic only, and it learns from what it can."""
    algorithm, critic, defaults = arguments.algorithm, arguments.critic, CriticArguments()
    estimates = algorithm.token_advantages == "gae"
    for name in ("gamma", "lambd"):
        if getattr(algorithm, name) != 1.0 and not estimates:
            yield f"--{name} {getattr(algorithm, name)} has no effect without --token-advantages gae"
    for name in ("lambd_length_alpha", "critic_lambd"):
        if (given := getattr(algorithm, name)) is not None and not estimates:
            yield f"--{name.replace('_', '-')} {given} has no effect without --token-advantages gae"
    if algorithm.lambd_length_alpha is not None and algorithm.lambd != 1.0:
        yield (
            f"--lambd {algorithm.lambd} with --lambd-length-alpha {algorithm.lambd_length_alpha}, which takes its "
            "place: leave one of them out"
        )
    own = ":" in (algorithm.token_advantages or "")  # may need values, too
    if not estimates and not own:
        for each in fields(critic):
            if (value := getattr(critic, each.name)) != getattr(defaults, each.name):
                yield f"--{each.name.replace('_', '-')} {value} has no effect without --token-advantages gae"
    if not estimates:
        return
    if algorithm.advantage_estimator in ("grpo", "rloo", "on_policy_distillation"):
        yield (
            f"--token-advantages gae with --advantage-estimator {algorithm.advantage_estimator}: the critic is the "
            "baseline of rewards, of which nothing or only the difference from a group's mean is left; use "
            "--advantage-estimator reinforce"
        )
    if arguments.model.lora_rank:
        yield (
            f"--lora-rank {arguments.model.lora_rank} with --token-advantages gae: a critic is trained whole, which "
            "takes the memory that adapters save; leave one of them out"
        )
    if critic.num_critic_only_steps >= arguments.rollout.num_rollout:
        yield (
            f"--num-critic-only-steps {critic.num_critic_only_steps} leaves none of --num-rollout "
            f"{arguments.rollout.num_rollout} for the policy: lower it, or raise --num-rollout"
        )
