"""The trainer's objective: a policy loss, weighted by corrections, plus a KL loss, minus an entropy bonus.

For each token that carries loss, with w the product of the corrections' weights::

    w · policy loss + kl_loss_coef · KL(π ‖ π_ref) - entropy_coef · H(π)

averaged over the optimizer step as ``--loss-aggregation`` says. With a teacher, ``distillation`` adds to the
advantages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from miles_async.algorithms import registry
from miles_async.algorithms.coefficients import EntropyBonus, KlCoefficient
from miles_async.algorithms.distillation import Distillation
from miles_async.algorithms.ratio import interpolated
from miles_async.algorithms.reference_updates import ReferenceUpdates
from miles_async.algorithms.token_advantages.kl_in_reward import KlInReward
from miles_async.algorithms.whole_batch.transform import (
    BatchTransform,
    PerToken,
    Surveyed,
    Surveys,
    WholeBatch,
    per_token_of,
)
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

OldPolicy = Literal["trainer", "rollout", "interpolated", "kept"]
"""trainer: before its first optimizer step on the batch; rollout: the engine's; interpolated: between both; kept: the
trainer's with the weights of the version that sampled the token.
"""

OLD_POLICIES: dict[ProxLogpMethod, OldPolicy] = {
    "recompute": "trainer",
    "loglinear": "interpolated",
    "snapshots": "kept",
}


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
    reference_updates: ReferenceUpdates | None = None  # None: a fixed reference model
    transforms: tuple[BatchTransform, ...] = ()  # before the first optimizer step on a batch, in this order
    token_advantages: TokenAdvantages | None = None  # also one of the transforms
    critic_advantages: TokenAdvantages | None = None  # for the critic's returns; None: the policy's
    distillation: Distillation | None = None
    old_policy: OldPolicy = "trainer"  # whose log-probs ``old_logprobs`` are
    kept_versions: int = 1  # weight versions that the trainer keeps for the old policy "kept"
    log_entropy: bool = False
    entropy_bonus: EntropyBonus | None = None
    sampled: bool = True  # engines generated the tokens, and gave their log-probs
    routing_replay: RoutingReplay | None = None  # experts that a mixture's tokens pass through; None: routers choose

    @property
    def needs(self) -> frozenset[Need]:
        """Arrays that any part needs the trainer to compute."""
        needs: set[Need] = {"entropy"} if self.log_entropy or self.entropy_bonus else set()
        if self.kl is not None:
            needs.add("ref_logprobs")
        for part in (self.policy_loss, *self.corrections):
            needs.update(part.needs)
        if self.distillation is not None:
            needs.update(self.distillation.needs)
        return frozenset(needs) | self.needs_of_transforms

    @property
    def kl_in_reward(self) -> KlInReward | None:
        """Token advantages that include a weighted KL, if these do."""
        return self.token_advantages if isinstance(self.token_advantages, KlInReward) else None

    @property
    def adaptive(self) -> KlCoefficient | None:
        """The coefficient that adapts to the KL after each rollout step; None if none does."""
        within = self.kl_in_reward
        found = self.kl_coefficient if within is None else within.coefficient
        return found if found is not None and found.target is not None else None

    @property
    def adapts_to(self) -> str:
        """Name of the metric that :attr:`adaptive` adapts to."""
        return "ref_kl" if self.kl_in_reward is None else "reward_kl"

    @property
    def weighs_trajectories(self) -> bool:
        """True if a transform needs the norm of each trajectory's gradient."""
        return any(transform.weighs_trajectories for transform in self.transforms)

    def changed(
        self, *, entropy: float | None = None, kl_loss: float | None = None, kl: float | None = None
    ) -> Objective:
        """Return a copy with other constant coefficients: of the entropy bonus, the KL loss, the KL in the reward."""
        if kl_loss is not None:
            assert self.kl_coefficient is not None, "a KL loss has a coefficient"
            self.kl_coefficient.value = kl_loss
        if kl is not None:
            assert self.kl_in_reward is not None, "no KL is in the reward"
            self.kl_in_reward.coefficient.value = kl
        if entropy is None:
            return self
        return replace(self, entropy_bonus=EntropyBonus(begin=entropy, end=entropy) if entropy else None)

    @property
    def needs_of_transforms(self) -> frozenset[Need]:
        """Arrays that are needed before the first optimizer step."""
        return frozenset(need for transform in self.transforms for need in transform.needs)

    def prepared(self, batches: Sequence[TokenBatch], whole: WholeBatch) -> list[TokenBatch]:
        """Apply all transforms to the micro-batches of a rollout batch. Collective."""
        for transform in self.transforms:
            batches = transform.prepare(batches, whole)
        return list(batches)

    def advantages(self, batch: TokenBatch) -> Tensor:
        """float32 [N]: advantages after ``--token-advantages``, 0 where no loss is carried."""
        return batch.advantages if self.token_advantages is None else PerToken(self.token_advantages).advantages(batch)

    def returns(self, batch: TokenBatch) -> Tensor:
        """float32 [N]: the critic's target returns. ``batch`` still has the advantages of its samples."""
        advantages = replace(self, token_advantages=self.critic_advantages or self.token_advantages).advantages(batch)
        return (advantages + batch.values) * batch.loss_mask

    def __call__(
        self, logprobs: Tensor, batch: TokenBatch, *, entropy: Tensor | None = None, progress: float = 0.0
    ) -> LossSums:
        """Sums over the tokens of ``batch`` that carry loss: 0 where there are none.

        ``logprobs``: float32 [N]. ``entropy``: likewise, with gradient, where the objective needs it. ``progress``:
        share of the run's optimizer steps made so far.
        """
        charged = batch  # whose old log-probs the KL in the reward was computed from
        if self.old_policy == "interpolated":
            batch = batch.with_computed("old_logprobs", interpolated(logprobs, batch))
        teacher_metrics: Mapping[str, Tensor] = {}
        if self.distillation is not None:
            advantages, teacher_metrics = self.distillation(logprobs.detach(), batch)
            batch = replace(batch, advantages=advantages)
        loss, metrics = self.policy_loss(logprobs, batch)
        loss, metrics = per_token_of(loss, batch, "--policy-loss"), {**metrics, **teacher_metrics}
        if entropy is not None:
            metrics["entropy"] = entropy
        for correction in self.corrections:
            weight, correction_metrics = correction(logprobs.detach(), batch)
            loss = loss * per_token_of(weight, batch, "--tis-mode")
            metrics |= correction_metrics
        metrics["policy_loss"] = loss
        if self.kl is not None:
            divergence = per_token_of(self.kl(logprobs, batch.ref_logprobs), batch, "--kl-loss-type")
            assert self.kl_coefficient is not None, "a KL loss has a coefficient"
            loss = loss + self.kl_coefficient.value * divergence
            metrics["ref_kl"] = divergence
        if self.kl_in_reward is not None:
            metrics["reward_kl"] = self.kl_in_reward.divergence(charged)
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
    """Make the objective from the flags. ``kept_versions``: how many weight versions may have sampled trained tokens.

    Raises ConfigurationError.
    """
    loss, tokens = registry.policy_loss(arguments), registry.token_advantages(arguments)
    return Objective(
        policy_loss=loss,
        aggregation=registry.aggregation(arguments),
        corrections=registry.corrections(arguments),
        kl=registry.kl_estimator(arguments),
        kl_coefficient=KlCoefficient(
            value=arguments.kl_loss_coef, target=arguments.kl_target, horizon=arguments.kl_horizon
        ),
        reference_updates=ReferenceUpdates.of(arguments),
        transforms=(
            *registry.switched(registry.SAMPLE_TRANSFORMS, BatchTransform, arguments),
            *(() if tokens is None else (PerToken(tokens),)),
            *registry.switched(registry.TOKEN_TRANSFORMS, BatchTransform, arguments),
            *((Surveyed(loss),) if isinstance(loss, Surveys) else ()),
        ),
        token_advantages=tokens,
        critic_advantages=registry.critic_advantages(arguments),
        distillation=Distillation(arguments) if arguments.use_opd else None,
        old_policy="rollout" if arguments.use_rollout_logprobs else OLD_POLICIES[arguments.prox_logp_method],
        kept_versions=kept_versions,
        log_entropy=arguments.log_entropy,
        entropy_bonus=EntropyBonus.of(arguments),
        sampled=not arguments.supervised,
        routing_replay=arguments.routing_replay,
    )


def _summary(name: str, values: Tensor, mask: Tensor) -> Tensor:
    masked = values * mask
    return masked.max() if name.endswith("_max") and masked.numel() else masked.sum()
