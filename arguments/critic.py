"""The critic of ``--token-advantages gae``: its training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_async.arguments.flag import flag

_CRITIC = ("token_advantages=gae", "token_advantages=own")


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticArguments:
    """Critic"""

    critic_lr: float | None = flag(
        None, "peak learning rate of the critic (default: --lr)", needs=_CRITIC, above=0, at_most=1
    )
    critic_lr_warmup_iters: int = flag(
        0, "as --lr-warmup-iters, of the critic's learning rate", needs=_CRITIC, at_least=0
    )
    critic_lr_warmup_fraction: float | None = flag(
        None,
        "as --lr-warmup-fraction, of the critic's learning rate",
        metavar="FRACTION",
        needs=_CRITIC,
        at_least=0,
        at_most=1,
    )
    value_clip: float | None = flag(
        0.2,
        "largest change of a value since before the batch's first optimizer step; none: no bound",
        needs=_CRITIC,
        above=0,
    )
    critic_updates_per_step: int = flag(
        1, "optimizer steps of the critic, on the same returns, per one of the policy", needs=_CRITIC, at_least=1
    )
    num_critic_only_steps: int = flag(
        0, "rollout steps at the beginning that train the critic alone", needs=_CRITIC, at_least=0
    )
    critic_hf_checkpoint: Path | None = flag(
        None,
        "language model that initializes the critic's layers (default: --hf-checkpoint); its values start at 0",
        needs=_CRITIC,
    )
