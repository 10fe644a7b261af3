"""Check the critic's flags against each other and the rest."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.arguments import Arguments


def check_critic(arguments: Arguments) -> Iterator[str]:
    """Check that the critic can learn under the other flags."""
    algorithm, critic = arguments.algorithm, arguments.critic
    if algorithm.lambd_length_alpha is not None and algorithm.lambd != 1.0:
        yield (
            f"--lambd {algorithm.lambd} with --lambd-length-alpha {algorithm.lambd_length_alpha}, which takes its "
            "place: leave one of them out"
        )
    if algorithm.token_advantages != "gae":
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
