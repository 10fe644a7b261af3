"""The seam for methods that need the whole rollout batch before its first optimizer step.

A method is a BatchTransform, made from the flags, and a row of ``registry.SAMPLE_TRANSFORMS`` or ``TOKEN_TRANSFORMS``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from miles_async.api import Need, TokenAdvantages, TokenBatch
from miles_async.errors import ContractViolation

Gather = Callable[[Tensor], Tensor]
"""[n] of this rank → concatenation over all data-parallel ranks; n may differ between ranks. Collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectories:
    """n trajectories of a rollout batch, each whole on one data-parallel rank."""

    group_ids: Tensor  # int64 [n]
    advantages: Tensor  # float64 [n], the reward up to a shift and a factor per group
    log_weights: Tensor  # float64 [n], log of the product of π / π_rollout over the tokens that carry loss
    squared_norms: Tensor  # float64 [n], ‖∇ log π(τ)‖²


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeBatch:
    """Access to the rest of a rollout batch: other ranks' tokens, and gradients of trajectories."""

    gather: Gather
    trajectories: Trajectories | None = None  # of this rank, if a transform weighs them: a pass each


class BatchTransform(Protocol):
    """Transforms all micro-batches of a rollout batch, once."""

    @property
    def needs(self) -> Collection[Need]: ...

    @property
    def weighs_trajectories(self) -> bool: ...

    def prepare(self, batches: Sequence[TokenBatch], whole: WholeBatch) -> list[TokenBatch]:
        """Return this rank's micro-batches with other arrays. Collective."""
        ...


@runtime_checkable
class Surveys(Protocol):
    """A policy loss that sees the whole rollout batch before the first optimizer step, with the arrays it needs."""

    @property
    def needs(self) -> Collection[Need]: ...

    def survey(self, batches: Sequence[TokenBatch], gather: Gather) -> list[Tensor]:
        """Return the values of ``TokenBatch.surveyed``, [N] per micro-batch. Collective."""
        ...


@dataclass(frozen=True, slots=True)
class Surveyed:
    """Adds ``TokenBatch.surveyed``, which a policy loss computes from the whole batch."""

    loss: Surveys
    weighs_trajectories: bool = False

    @property
    def needs(self) -> Collection[Need]:
        return {"old_logprobs", *self.loss.needs} - {"surveyed"}

    def prepare(self, batches: Sequence[TokenBatch], whole: WholeBatch) -> list[TokenBatch]:
        found = self.loss.survey(batches, whole.gather)
        return [batch.with_computed("surveyed", of_batch) for batch, of_batch in zip(batches, found, strict=True)]


@dataclass(frozen=True, slots=True)
class PerToken:
    """Turns advantages of samples into advantages of tokens (``--token-advantages``)."""

    estimator: TokenAdvantages
    weighs_trajectories: bool = False

    @property
    def needs(self) -> Collection[Need]:
        return self.estimator.needs

    def prepare(self, batches: Sequence[TokenBatch], whole: WholeBatch) -> list[TokenBatch]:
        return with_advantages(batches, map(self.advantages, batches))

    def advantages(self, batch: TokenBatch) -> Tensor:
        """float32 [N], 0 where no loss is carried."""
        found = per_token_of(self.estimator(batch), batch, "--token-advantages")
        return found.to(batch.advantages.dtype).masked_fill(batch.loss_mask == 0, 0.0)


def with_advantages(batches: Sequence[TokenBatch], advantages: Iterable[Tensor]) -> list[TokenBatch]:
    """The micro-batches with these advantages, [N] each."""
    return [replace(batch, advantages=one) for batch, one in zip(batches, advantages, strict=True)]


def per_token_of(values: Tensor, batch: TokenBatch, flag: str) -> Tensor:
    """Check that there is one number per token: a sum or mean would broadcast, and train something else."""
    if values.shape != batch.loss_mask.shape:
        raise ContractViolation(
            f"{flag}: expected one number per token, shape {list(batch.loss_mask.shape)}, found {list(values.shape)}"
        )
    return values
