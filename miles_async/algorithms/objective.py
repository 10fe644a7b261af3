"""The trainer's objective: a policy loss, weighted by corrections, plus a KL loss, minus a bonus for entropy.

Advantages are those of the batch; with a teacher, ``distillation`` adds its part to them.

For each token that carries loss, with the product w of the corrections' weights (1 without any)::

    w · policy loss + kl_loss_coef · KL(π ‖ π_ref) - entropy_coef · H(π)

and of that the mean that ``--loss-aggregation`` names, over the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from miles_async.algorithms import registry
from miles_async.algorithms.distillation import Distillation
from miles_async.algorithms.entropy import EntropyBonus
from miles_async.algorithms.kl_coefficient import KlCoefficient
from miles_async.algorithms.proximal import interpolated
from miles_async.algorithms.reference_updates import ReferenceUpdates
from miles_async.algorithms.token_advantages.kl_in_reward import KlInReward
from miles_async.algorithms.whole_batch.gather import Gather
from miles_async.algorithms.whole_batch.optimal_baseline import Trajectories, minus_optimal_baseline
from miles_async.algorithms.whole_batch.second_moment import within_second_moment
from miles_async.algorithms.whole_batch.whiten import whiten
from miles_async.api import (
    Aggregation,
    Correction,
    KlEstimator,
    Need,
    PolicyLoss,
    TokenAdvantages,
    TokenBatch,
)
from miles_async.arguments.algorithm import AlgorithmArguments, ProxLogpMethod, RoutingReplay
from miles_async.errors import ContractViolation

OldPolicy = Literal["trainer", "rollout", "interpolated", "kept"]
"""trainer: as it is before its first optimizer step on the batch; rollout: the engine's; interpolated: between both;
kept: the trainer's with the weights of the version that sampled the token.
"""


OLD_POLICIES: dict[ProxLogpMethod, OldPolicy] = {
    "recompute": "trainer",
    "loglinear": "interpolated",
    "snapshots": "kept",
}


@runtime_checkable
class Surveys(Protocol):
    """A policy loss that looks at the whole rollout batch before the first optimizer step."""

    def survey(self, batches: Sequence[TokenBatch], gather: Gather) -> list[Tensor]:
        """Return what the loss then reads as ``TokenBatch.surveyed``, [N] per micro-batch. All ranks call it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSums:
    """Sums of one micro-batch."""

    loss: Tensor  # the sum that gradients come from
    count: Tensor  # integer: tokens or sequences, which the loss of an optimizer step is the mean of
    metrics: Mapping[str, Tensor]  # sums over loss tokens, or the largest for names ending in ``_max``; no gradient
    batch: TokenBatch  # as the policy loss saw it


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The chosen algorithms, called for every micro-batch."""

    policy_loss: PolicyLoss
    aggregation: Aggregation
    corrections: tuple[Correction, ...] = ()
    kl: KlEstimator | None = None
    kl_coefficient: KlCoefficient | None = None  # of that estimate in the loss
    reference_updates: ReferenceUpdates | None = None  # None: the reference model stays as it is
    optimal_baseline: bool = False  # advantages get that of their group, which takes norms of gradients
    token_advantages: TokenAdvantages | None = None  # comes before the first optimizer step on a batch
    critic_advantages: TokenAdvantages | None = None  # that returns are made of; None: the policy's
    normalize_advantages: bool = False
    m2_threshold: float | None = None
    distillation: Distillation | None = None
    old_policy: OldPolicy = "trainer"  # whose log-probs ``old_logprobs`` are
    kept_versions: int = 1  # how many the trainer keeps for an old policy that is kept
    log_entropy: bool = False
    entropy_bonus: EntropyBonus | None = None
    sampled: bool = True  # engines generated the tokens, and gave their log-probs
    routing_replay: RoutingReplay | None = None  # experts that a mixture's tokens pass through; None: routers choose

    @property
    def needs(self) -> frozenset[Need]:
        """Arrays that the trainer computes for any of the parts."""
        needs: set[Need] = {"entropy"} if self.log_entropy or self.entropy_bonus else set()
        if self.kl is not None:
            needs.add("ref_logprobs")
        for part in (self.policy_loss, *self.corrections):
            needs.update(part.needs)
        if self.distillation is not None:
            needs.update(self.distillation.needs)
        needs |= self.needs_for_advantages
        return frozenset(needs)

    @property
    def adaptive(self) -> KlCoefficient | None:
        """The coefficient that follows the KL from one rollout step to the next; None if none does."""
        in_reward = self.token_advantages if isinstance(self.token_advantages, KlInReward) else None
        found = self.kl_coefficient if in_reward is None else in_reward.coefficient
        return found if found is not None and found.target is not None else None

    @property
    def adapts_to(self) -> str:
        """The metric that is the KL which :attr:`adaptive` follows."""
        return "reward_kl" if isinstance(self.token_advantages, KlInReward) else "ref_kl"

    @property
    def prepares_batches(self) -> bool:
        """True if batches get something before the first optimizer step, such as other advantages."""
        changed = self.optimal_baseline or self.token_advantages is not None or self.normalize_advantages
        return changed or self.m2_threshold is not None or isinstance(self.policy_loss, Surveys)

    @property
    def needs_for_advantages(self) -> frozenset[Need]:
        """Arrays that are needed before the first optimizer step."""
        needs = set[Need](() if self.token_advantages is None else self.token_advantages.needs)
        compares = self.m2_threshold is not None or isinstance(self.policy_loss, Surveys)
        return frozenset(needs | ({"old_logprobs"} if compares else set()))

    def prepared(
        self, batches: Sequence[TokenBatch], gather: Gather, trajectories: Trajectories | None = None
    ) -> list[TokenBatch]:
        """All micro-batches of a rollout batch with their advantages (with the optimal baseline, of tokens, then
        whitened, then masked) and with what the policy loss finds in the batch as a whole. Collective.

        ``trajectories``: some of the batch, each on one rank; for the optimal baseline.
        """

        def replaced(advantages: Iterable[Tensor]) -> list[TokenBatch]:
            return [replace(batch, advantages=one) for batch, one in zip(batches, advantages, strict=True)]

        if self.optimal_baseline:
            assert trajectories is not None, "the optimal baseline weighs trajectories"
            batches = replaced(minus_optimal_baseline(batches, trajectories, gather))
        batches = replaced(self.advantages(batch) for batch in batches)
        if self.normalize_advantages:
            batches = replaced(whiten(batches, gather))
        if self.m2_threshold is not None:
            batches = replaced(within_second_moment(batches, self.m2_threshold, gather))
        if isinstance(self.policy_loss, Surveys):
            found = self.policy_loss.survey(batches, gather)
            return [batch.with_computed("surveyed", of_batch) for batch, of_batch in zip(batches, found, strict=True)]
        return list(batches)

    def advantages(self, batch: TokenBatch) -> Tensor:
        """float32 [N]: what ``--token-advantages`` makes of those of the samples, 0 where no loss is carried."""
        return _token_advantages(self.token_advantages, batch)

    def returns(self, batch: TokenBatch) -> Tensor:
        """float32 [N]: what the critic learns to foretell. ``batch`` has the advantages of its samples still."""
        advantages = _token_advantages(self.critic_advantages or self.token_advantages, batch)
        return (advantages + batch.values) * batch.loss_mask

    def __call__(
        self, logprobs: Tensor, batch: TokenBatch, *, entropy: Tensor | None = None, progress: float = 0.0
    ) -> LossSums:
        """Sums over the tokens of ``batch`` that carry loss: 0 where there are none.

        ``logprobs``: float32 [N]. ``entropy``: the same with its gradient, where the objective needs it. ``progress``:
        share of the run's optimizer steps that are behind.
        """
        if self.old_policy == "interpolated":
            batch = batch.with_computed("old_logprobs", interpolated(logprobs, batch))
        taught: Mapping[str, Tensor] = {}
        if self.distillation is not None:
            advantages, taught = self.distillation(logprobs.detach(), batch)
            batch = replace(batch, advantages=advantages)
        loss, metrics = self.policy_loss(logprobs, batch)
        loss, metrics = _per_token(loss, batch, "--policy-loss"), {**metrics, **taught}
        if entropy is not None:
            metrics["entropy"] = entropy
        for correction in self.corrections:
            weight, correction_metrics = correction(logprobs.detach(), batch)
            loss = loss * _per_token(weight, batch, "--tis-mode")
            metrics |= correction_metrics
        metrics["policy_loss"] = loss
        if self.kl is not None:
            divergence = _per_token(self.kl(logprobs, batch.ref_logprobs), batch, "--kl-loss-type")
            assert self.kl_coefficient is not None, "a KL loss has a coefficient"
            loss = loss + self.kl_coefficient.value * divergence
            metrics["ref_kl"] = divergence
        if isinstance(self.token_advantages, KlInReward):
            metrics["reward_kl"] = self.token_advantages.divergence(batch)
        if self.entropy_bonus is not None:
            assert entropy is not None, "the entropy bonus needs an entropy"
            loss = loss - self.entropy_bonus.coefficient(progress) * entropy
        total, count = self.aggregation(loss, batch)
        return LossSums(
            loss=total,
            count=count,
            metrics={name: _summary(name, values.detach(), batch.loss_mask) for name, values in metrics.items()},
            batch=batch,
        )


def make_objective(arguments: AlgorithmArguments, *, kept_versions: int = 1) -> Objective:
    """Make the objective that the flags describe. ``kept_versions``: how many sets of weights may have sampled tokens
    that are trained. Raises ConfigurationError.
    """
    return Objective(
        policy_loss=registry.policy_loss(arguments),
        aggregation=registry.aggregation(arguments),
        corrections=registry.corrections(arguments),
        kl=registry.kl_estimator(arguments),
        kl_coefficient=KlCoefficient(
            value=arguments.kl_loss_coef, target=arguments.kl_target, horizon=arguments.kl_horizon
        ),
        reference_updates=ReferenceUpdates.of(arguments),
        optimal_baseline=arguments.advantage_estimator == "opob",
        token_advantages=registry.token_advantages(arguments),
        critic_advantages=registry.critic_advantages(arguments),
        normalize_advantages=arguments.normalize_advantages,
        m2_threshold=arguments.m2_threshold,
        distillation=Distillation(arguments) if arguments.use_opd else None,
        old_policy=_old_policy(arguments),
        kept_versions=kept_versions,
        log_entropy=arguments.log_entropy,
        entropy_bonus=EntropyBonus.of(arguments),
        sampled=not arguments.supervised,
        routing_replay=arguments.routing_replay,
    )


def _old_policy(arguments: AlgorithmArguments) -> OldPolicy:
    if arguments.use_rollout_logprobs:
        return "rollout"
    return OLD_POLICIES[arguments.prox_logp_method]


def _token_advantages(estimator: TokenAdvantages | None, batch: TokenBatch) -> Tensor:
    if estimator is None:
        return batch.advantages
    found = _per_token(estimator(batch), batch, "--token-advantages")
    return found.to(batch.advantages.dtype).masked_fill(batch.loss_mask == 0, 0.0)


def _per_token(values: Tensor, batch: TokenBatch, flag: str) -> Tensor:
    """A sum or mean would broadcast, and train something else."""
    if values.shape != batch.loss_mask.shape:
        raise ContractViolation(
            f"{flag}: expected one number per token, shape {list(batch.loss_mask.shape)}, found {list(values.shape)}"
        )
    return values


def _summary(name: str, values: Tensor, mask: Tensor) -> Tensor:
    masked = values * mask
    return masked.max() if name.endswith("_max") and masked.numel() else masked.sum()
