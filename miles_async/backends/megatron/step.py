"""One rollout step of the trainer: every optimizer step of a TrainShard, ``--ppo-epochs`` times.

The loss is a mean over an optimizer step (over its loss tokens, or its sequences: ``--loss-aggregation``), over all
micro-batches and data-parallel ranks, so neither packing nor the number of ranks changes it.

An optimizer step whose gradient is exactly 0 is skipped (no token carries loss, or all advantages are 0 and there is
neither a KL loss nor an entropy bonus, nor training of layers for multi-token prediction): Adam would move the weights
by the momentum of earlier steps, and weight decay would shrink them. A step that breaks a limit is skipped, too
(``step_limits.py``). All ranks have the same loss tokens and gradient norm, so they decide alike. The schedule of the
learning rate counts skipped steps, and so depends on the number of rollout steps alone, as do weight versions.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state
from torch import Tensor

from miles_async.algorithms.mismatch import mismatch_sums
from miles_async.algorithms.objective import LossSums, Objective
from miles_async.algorithms.spread import spread_sums
from miles_async.algorithms.step_scale import LOG_SUMS as STEP_SUMS
from miles_async.algorithms.step_scale import StepScale, scaled_rates
from miles_async.algorithms.whole_batch.transform import Trajectories, WholeBatch
from miles_async.api import Need
from miles_async.backends.megatron.distributed import gather_from_replicas, reduce_metrics
from miles_async.backends.megatron.gradient_norms import GradientNorms
from miles_async.backends.megatron.kept_weights import KeptWeights
from miles_async.backends.megatron.laps import Laps
from miles_async.backends.megatron.learner import Critic, Learner
from miles_async.backends.megatron.metrics import MEAN, ScoresOnDevice, Tally, accumulate, mean, step_metrics
from miles_async.backends.megatron.model.forward import Pipeline, Scoring
from miles_async.backends.megatron.model.output import ModelOutput
from miles_async.backends.megatron.model.scores import Scorer, values_of
from miles_async.backends.megatron.packing.pack import PackedBatch, PackLayout, pack_batch
from miles_async.backends.megatron.step_limits import StepLimits
from miles_async.errors import ContractViolation
from miles_async.types import TokenScores, TrainShard

Packs = list[PackedBatch]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRunner:
    """One rank's parts for training; built once by the backend, stateless."""

    policy: Learner
    kept: KeptWeights | None  # if ratios compare with the weights that sampled a token
    critic: Critic | None  # if the objective needs its values
    reference: Pipeline | None  # frozen model, if the objective needs its log-probs
    objective: Objective
    limits: StepLimits
    scale: StepScale | None  # of the learning rate; None: 1
    epochs: int
    total_steps: int  # optimizer steps of the whole run
    mtp_loss_scaling_factor: float  # of layers for multi-token prediction, if trained
    scorer: Scorer
    layout: PackLayout
    device: torch.device
    laps: Laps  # of the last rollout step

    def train(
        self, shard: TrainShard, *, same_weights: bool, rollouts: int
    ) -> tuple[dict[str, float], list[TokenScores]]:
        """Run all optimizer steps of the shard; return metrics over all ranks, and the scores of the branches that are
        shown, on one of the ranks that have them. Collective.

        ``same_weights``: engines have these weights as the shard's version. ``rollouts``: rollout steps before this
        one. Raises ContractViolation if the ranks' loss tokens differ from the number in the shard.
        """
        started = time.perf_counter()
        self.laps.begin()
        present = shard.target_version if same_weights else None  # the version of these weights on engines
        if self.kept is not None and present is not None:
            self.kept.keep(present)
        steps = [
            [pack_batch(batch, shard.target_version, self.layout, self.device) for batch in step]
            for step in shard.optimizer_steps
        ]
        self.laps.end("packing")
        steps = self._with_values(self._with_entropy(self._with_logprobs(steps, present)))
        steps = self._prepared(steps, self._trajectories(shard)) * self.epochs
        self.laps.end("scoring")
        loss_tokens = shard.loss_tokens * self.epochs
        tally = Tally()
        critic_alone = self.critic is not None and rollouts < self.critic.rollouts_alone
        schedules = [self.policy.scheduler, *([self.critic.learner.scheduler] if self.critic is not None else ())]
        for schedule in schedules:  # a resumed run may have another number of steps per rollout
            schedule.num_steps = rollouts * len(steps)
        for index, packs in enumerate(steps):
            for schedule in schedules:
                schedule.step(1)
            if loss_tokens[index] == 0:  # on no rank; there is no mean over nothing
                continue
            for packed in packs:
                accumulate(tally.sums, self._counts(packed))
            if self.critic is not None:
                self._train_critic(self.critic, packs, tally)
            if not critic_alone:
                tally.lags.append((len(tally.grad_norms), loss_tokens[index]))
                self._train_policy(index, packs, tally, same_weights=same_weights)
            self.laps.end("optimizer")
        reduced = reduce_metrics(tally.sums, self.device)
        _check_loss_tokens(reduced, sum(loss_tokens), shard.target_version)
        of_critic = {}
        if self.critic is not None:
            of_critic = {"critic_grad_norm": mean(tally.critic_grad_norms), "critic_lr": self.critic.learner.lr}
        seconds = time.perf_counter() - started
        metrics = step_metrics(reduced, tally, lr=self.policy.lr, steps=len(steps), seconds=seconds)
        return of_critic | metrics, [_on_host(branch, scores) for branch, scores in tally.shown.items()]

    def _train_critic(self, critic: Critic, packs: Packs, tally: Tally) -> None:
        for _ in range(critic.updates):
            sums, norm = critic.gradient(packs)
            accumulate(tally.sums, sums)
            if (breach := self.limits.breach_of_critic(norm)) is not None:
                tally.breaches.append(breach)
            elif norm > 0:
                critic.learner.step(norm)
                tally.critic_grad_norms.append(norm)

    def _train_policy(self, index: int, packs: Packs, tally: Tally, *, same_weights: bool) -> None:
        sums, norm = self.policy.gradient(packs, partial(self._loss, index, tally.shown))
        accumulate(tally.sums, sums)
        if (breach := self.limits.breach(norm, sums, self.device, same_weights=same_weights)) is not None:
            tally.breaches.append(breach)
        elif norm > 0:
            if self.scale is None:
                self.policy.step(norm)
            else:
                tally.lr_factors.append(self._scaled_step(self.scale, sums, norm))
            tally.grad_norms.append(norm)

    def _with_logprobs(self, steps: list[Packs], present: int | None) -> list[Packs]:
        """Add the log-probs that the objective needs before any optimizer step. ``present``: the version of the
        policy's weights, if engines have them.
        """
        objective = self.objective
        if "ref_logprobs" in objective.needs:
            assert self.reference is not None, "the objective needs a reference model"
            steps = self._with_scores(steps, "ref_logprobs", self.reference, self.scorer.logprobs)
        if "trainer_logprobs" in objective.needs:
            steps = self._with_scores(steps, "trainer_logprobs", self.policy.model, self.scorer.logprobs)
        early = "old_logprobs" in objective.needs_of_transforms
        if "old_logprobs" not in objective.needs or (objective.old_policy == "interpolated" and not early):
            return steps
        if objective.old_policy == "rollout":
            return _each(steps, lambda packed: _computed(packed, "old_logprobs", packed.batch.rollout_logprobs))
        if self.kept is not None:
            return self._with_kept_logprobs(self.kept, steps, present)
        # The first step's loss has the old policy in its own forward pass, unless the step is repeated.
        first = 0 if early or self.epochs > 1 else 1
        record = objective.routing_replay == "old_policy"
        return steps[:first] + self._with_scores(
            steps[first:], "old_logprobs", self.policy.model, self.scorer.logprobs, record=record
        )

    def _with_kept_logprobs(self, kept: KeptWeights, steps: list[Packs], present: int | None) -> list[Packs]:
        """Add the log-probs of each token by the version that sampled it."""
        batches = [packed.batch for packs in steps for packed in packs]
        sampled = torch.cat([batch.weight_versions[batch.loss_mask != 0] for batch in batches])
        for version in gather_from_replicas(kept.scoring(sampled)).unique().tolist():
            with nullcontext() if version == present else kept.at(version):
                scored = self._with_scores(steps, "old_logprobs", self.policy.model, self.scorer.logprobs)
            steps = [
                [
                    _merged(packed, other, kept.scoring(packed.batch.weight_versions) == version)
                    for packed, other in both
                ]
                for both in (zip(*packs, strict=True) for packs in zip(steps, scored, strict=True))
            ]
        return steps

    def _with_entropy(self, steps: list[Packs]) -> list[Packs]:
        """Add entropies, if the objective needs them before any optimizer step; else each step has its own."""
        if "entropy" not in self.objective.needs_of_transforms:
            return steps
        return self._with_scores(steps, "entropy", self.policy.model, self.scorer.entropies)

    def _with_values(self, steps: list[Packs]) -> list[Packs]:
        """Add values, and on the last pipeline stage returns, for the critic."""
        if self.critic is None:
            return steps
        steps = self._with_scores(steps, "values", self.critic.learner.model, values_of)
        if not parallel_state.is_pipeline_last_stage():
            return steps
        return _each(steps, lambda packed: dataclasses.replace(packed, returns=self.objective.returns(packed.batch)))

    def _with_scores(
        self, steps: list[Packs], name: Need, model: Pipeline, scoring: Scoring, *, record: bool = False
    ) -> list[Packs]:
        """Add an array. ``record``: also the chosen experts, which optimizer steps then replay."""
        if not steps:
            return steps
        scores, chosen = model.score([packed for packs in steps for packed in packs], scoring, record=record)
        if record:
            experts = iter(chosen)
            steps = _each(steps, lambda packed: dataclasses.replace(packed, experts=next(experts)))
        if not scores:  # not the last pipeline stage: no loss here
            return steps
        remaining = iter(scores)
        return _each(steps, lambda packed: _computed(packed, name, next(remaining)))

    def _trajectories(self, shard: TrainShard) -> Trajectories | None:
        """Weights and gradient norms of the shard's samples, if the objective weighs them."""
        if not self.objective.weighs_trajectories:
            return None
        norms = GradientNorms(policy=self.policy.model, scorer=self.scorer, layout=self.layout, device=self.device)
        return norms.of(shard)

    def _prepared(self, steps: list[Packs], trajectories: Trajectories | None) -> list[Packs]:
        """Apply the objective's transforms, on the last pipeline stage."""
        if not self.objective.transforms or not parallel_state.is_pipeline_last_stage():
            return steps
        batches = [packed.batch for packs in steps for packed in packs]
        whole = WholeBatch(gather=gather_from_replicas, trajectories=trajectories)
        found = iter(self.objective.prepared(batches, whole))
        return _each(steps, lambda packed: dataclasses.replace(packed, loss_inputs=next(found)))

    def _scaled_step(self, scale: StepScale, sums: Mapping[str, Tensor], norm: float) -> float:
        """Make an optimizer step with a scaled learning rate; return the factor. ``sums``: this rank's. Collective."""
        of_rank = sums.get(STEP_SUMS, torch.full((3,), -torch.inf, device=self.device))
        factor = scale.factor(reduce_metrics({STEP_SUMS: of_rank}, self.device)[STEP_SUMS])
        with scaled_rates(self.policy.optimizer.param_groups, factor):
            self.policy.step(norm)
        return factor

    def _loss(self, index: int, shown: dict[int, ScoresOnDevice], packed: PackedBatch, output: ModelOutput) -> LossSums:
        objective, batch = self.objective, packed.batch
        logprobs, entropy = self.scorer(packed, output, entropy="entropy" in objective.needs)
        if entropy is not None:
            batch = batch.with_computed("entropy", entropy.detach())
        before = batch.computed.get("old_logprobs") if objective.old_policy == "trainer" else None
        if before is None and index == 0 and objective.sampled:
            before = logprobs.detach()
        if before is not None and objective.old_policy == "trainer":
            batch = batch.with_computed("old_logprobs", before)
        if packed.shown and _reports_scores():
            found = before if before is not None else batch.computed.get("trainer_logprobs")
            if found is None and index == 0:
                found = logprobs
            for branch, own in packed.shown.items():  # with --ppo-epochs, the first pass's stay
                shown.setdefault(branch, [None if each is None else each.detach()[own] for each in (found, entropy)])
        progress = (self.policy.scheduler.num_steps - 1) / self.total_steps  # which counts this step already
        sums = objective(logprobs, batch, entropy=entropy, progress=progress)
        loss, of_ahead = sums.loss, {}
        if output.ahead:
            misses = -self.scorer.ahead(packed, output).mean(0)
            loss = loss + self.mtp_loss_scaling_factor * objective.aggregation(misses, packed.batch)[0]
            of_ahead = {"mtp_loss": (misses.detach() * packed.batch.loss_mask).sum()}
        metrics = {
            **{MEAN + name: values for name, values in {**sums.metrics, **of_ahead}.items()},
            **({} if before is None else mismatch_sums(before, batch)),
            **(spread_sums(logprobs, sums.batch) if objective.sampled else {}),
            **({} if self.scale is None else self.scale.sums(logprobs, batch)),
            "loss": sums.loss.detach(),
            "loss_count": sums.count,
        }
        return dataclasses.replace(sums, loss=loss, metrics=metrics)

    def _counts(self, packed: PackedBatch) -> dict[str, Tensor]:
        carries_loss = packed.batch.loss_mask != 0
        counts = {"tokens": packed.num_tokens, "loss_tokens": int(carries_loss.sum())}
        if self.kept is not None:
            versions = packed.batch.weight_versions[carries_loss]
            counts[f"{MEAN}unkept_version_fraction"] = int((self.kept.scoring(versions) != versions).sum())
        return {name: torch.tensor(float(count), device=self.device) for name, count in counts.items()}


def _reports_scores() -> bool:
    """True on the first of the ranks that have the same branches."""
    return parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0


def _on_host(branch: int, scores: ScoresOnDevice) -> TokenScores:
    logprobs, entropies = (None if values is None else values.float().cpu().numpy() for values in scores)
    return TokenScores(branch=branch, logprobs=logprobs, entropies=entropies)


def _each(steps: list[Packs], change: Callable[[PackedBatch], PackedBatch]) -> list[Packs]:
    return [[change(packed) for packed in packs] for packs in steps]


def _computed(packed: PackedBatch, name: Need, values: Tensor) -> PackedBatch:
    return dataclasses.replace(packed, loss_inputs=packed.batch.with_computed(name, values))


def _merged(packed: PackedBatch, scored: PackedBatch, by_this: Tensor) -> PackedBatch:
    """Take the old log-probs of ``scored`` where ``by_this``, else of ``packed``."""
    before, now = (each.batch.computed.get("old_logprobs") for each in (packed, scored))
    if before is None or now is None:
        return scored
    return _computed(scored, "old_logprobs", torch.where(by_this, now, before))


def _check_loss_tokens(reduced: Mapping[str, Tensor], promised: int, version: int) -> None:
    found = float(reduced.get("loss_tokens", 0.0))
    if found != promised:
        raise ContractViolation(
            f"the batch for version {version} has {promised} loss tokens over all ranks, trained were {found:g}: its "
            "shards do not belong together"
        )
