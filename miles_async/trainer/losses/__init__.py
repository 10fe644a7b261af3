"""Policy losses. Light to import: torch comes in with :func:`make_policy_loss`, in the trainer's processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arguments.algorithm import AlgorithmArguments

if TYPE_CHECKING:
    from miles_async.protocols import PolicyLoss


def make_policy_loss(arguments: AlgorithmArguments) -> PolicyLoss:
    from miles_async.trainer.losses.policy import GrpoLoss

    return GrpoLoss(arguments)
