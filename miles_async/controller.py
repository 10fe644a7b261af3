"""The loop: cut → train → publish, while rollouts continue and the next batch is prepared.

::

    rollout side   ── generate ── generate ── generate ── generate ── generate ──     (in the RolloutManager)
                         cut(v+1)╲   deliver v+1╱   cut(v+2)╲   deliver v+2╱
    trainer        ── train from v ── copy v+1 ── train from v+1 ── copy v+2 ── train from v+2 ──

    loop                 consumes                     waits for                      is unblocked by
    ----                 --------                     ---------                      ---------------
    dispatcher           prompts                      room: admitted − trained       commit_version
    train loop           a batch, cut for the         rollout_batch_size fresh       groups being finished
                         version it will step from    groups; the last delivery
    delivery             the trainer's new weights    files, an evaluation, engines  (engines, while paused)
    repair               joining engines              a delivery, to begin and end   engines coming up

The age bound (C1) holds because a batch is cut for exactly the version that the optimizer steps from:
while step s trains, the next batch is cut for ``version + 1`` if step s will be published and for ``version``
otherwise, and the loop copies that version before it takes that batch. ``_check_age`` asserts it once more where the
optimizer is about to step. The trainer holds the visible version or the next one: the copy is staged and delivered
while it trains on, and nothing more is copied until that is visible.

Either side's failure cancels the other and surfaces as the first error (C10). This module knows protocols
only; ``wiring/driver.py`` decides what stands behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from miles_async.arguments.checkpoint import CheckpointArguments
from miles_async.arguments.evaluation import EvaluationArguments
from miles_async.arguments.evaluation_sets import EvaluationSet, evaluation_sets
from miles_async.arguments.optimizer import OptimizerArguments
from miles_async.arguments.rollout import RolloutArguments
from miles_async.arguments.staleness import StalenessArguments
from miles_async.arguments.weights import WeightsArguments
from miles_async.bad_steps import BadSteps
from miles_async.errors import ContractViolation
from miles_async.runtime.clock import Stopwatch
from miles_async.seams import (
    NO_CHANGES,
    NO_TURNS,
    Checkpoints,
    Gpus,
    LiveSettings,
    Position,
    Publisher,
    Recorder,
    RolloutSide,
    TrainerSide,
)
from miles_async.types import PreparedBatch, Publication, SettingValue

log = structlog.get_logger(__name__)


class Controller:
    """Runs a training run from its first publication to its last evaluation."""

    def __init__(
        self,
        *,
        rollout: RolloutSide,
        trainer: TrainerSide,
        publisher: Publisher,
        checkpoints: Checkpoints,
        recorder: Recorder,
        gpus: Gpus = NO_TURNS,
        live: LiveSettings = NO_CHANGES,
        rollout_arguments: RolloutArguments,
        staleness: StalenessArguments,
        optimizer: OptimizerArguments,
        weights: WeightsArguments,
        evaluation: EvaluationArguments,
        checkpoint: CheckpointArguments,
    ) -> None:
        self._rollout = rollout
        self._trainer = trainer
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._gpus = gpus
        self._live = live
        self._asked: Mapping[str, SettingValue] = {}  # what takes effect after the step that is being trained
        self._evaluations_asked: set[int] = set()  # steps
        self._num_steps = rollout_arguments.num_rollout
        self._bound = staleness.bound
        self._waits = staleness.stale_group_action == "wait"
        self._interval = weights.update_weights_interval
        self._bad_steps = BadSteps(optimizer)
        self._evaluation = evaluation
        self._held_out = evaluation_sets(evaluation)
        self._checkpoint = checkpoint
        self._publishing: asyncio.Task[None] | None = None  # publication of the last step
        self._evaluating: asyncio.Task[None] | None = None  # the last evaluation
        self._may_publish = asyncio.Event()  # cleared while an evaluation needs the visible version
        self._may_publish.set()
        self.position = Position()

    async def run(self) -> None:
        """Run to the end. Raises the first error of either side, after everything else was cancelled."""
        self.position = await self._checkpoints.load() or Position()
        bound = "none" if self._bound is None else self._bound
        log.info("training begins", step=self.position.step, steps=self._num_steps, max_weight_staleness=bound)
        async with asyncio.TaskGroup() as scope:
            rollout = scope.create_task(self._rollout.run(), name="rollout")
            await self._publisher.copy(self.position.version)  # 0, or where the checkpoint left off
            self._gpus.training_is_over()
            await self._deliver(self.position.version)
            repair = scope.create_task(self._repair_engines(), name="repair")
            await self._train(scope)
            repair.cancel()
            await self._rollout.close()  # ends attempts in flight; lets rollout.run() return
            await rollout
        await self._publisher.close()

    # ------------------------------------------------------------------------------------------ the loop
    async def _train(self, scope: asyncio.TaskGroup) -> None:
        first = self.position.step
        self._live.begin(first)
        self._start_evaluation(scope, first)
        if first < self._num_steps:
            batch = self._start_cut(scope, first + 1, self.position.version)
        for step in range(first + 1, self._num_steps + 1):
            watch, version = Stopwatch(), self.position.version
            with watch.timed("step"):
                with watch.timed("wait"):
                    prepared = await batch
                self._check_age(prepared, version)
                await self._take_changes(step)  # no cut is under way
                publishes = await self._publishes_after(step, watch)
                if step < self._num_steps:
                    batch = self._start_cut(scope, step + 1, version + 1 if publishes else version)
                with watch.timed("wait"):
                    await self._gpus.for_training(self._evaluating)
                with watch.timed("train"):
                    train_metrics = self._comparable(await self._trainer.train(prepared.shards))
                self._bad_steps.judge(prepared, train_metrics)
                await self._rollout.trained(prepared.batch_id, self._trainer.token_scores)
                await self._published(watch)
                await self._advance(step, publishes=publishes)
            metrics = {
                **prepared.metrics,
                **{f"train/{name}": value for name, value in train_metrics.items()},
                **watch.metrics("time"),
                "weight_version/trainer": version,
            }
            rest = self._publish(scope, step, prepared.ages, metrics, delivers=publishes)
            self._publishing = scope.create_task(rest, name=f"publication of step {step}")
            if self._asked:
                await self._trainer.change(self._asked)
            if "checkpoint" in self._asked or self._checkpoint.due(step, last=step == self._num_steps):
                await self._checkpoints.save(self.position)
                scope.create_task(self._complete_checkpoint(step), name=f"checkpoint of step {step}")
            self._gpus.training_is_over()
            if step == self._num_steps:  # which `miles-async set` may have lowered
                break
        await self._published(Stopwatch())
        if self._evaluating is not None:
            await self._evaluating
        await self._complete_checkpoint(self._num_steps)

    async def _take_changes(self, step: int) -> None:
        """Between two cuts, apply requested changes: the batch of ``step`` keeps the bound that it was cut under, all
        later ones obey the new one (C1).
        """
        self._asked = {}
        changes = self._live.take(step, last=step == self._num_steps)
        if changes is None:
            return
        self._asked = changes.values
        self._bound = changes.bound(self._bound)
        if "evaluation" in self._asked:
            self._evaluations_asked.add(step)
        if "stop" in self._asked:
            self._num_steps = step
        await self._rollout.change(changes)
        log.info("settings change", after_step=step, **self._asked)

    async def _complete_checkpoint(self, step: int) -> None:
        """Write the checkpoint of ``step`` while training continues."""
        if metrics := await self._checkpoints.finish():
            self._recorder.checkpoint(step, metrics)

    async def _advance(self, step: int, *, publishes: bool) -> None:
        """After a trained step: copy its weights for publication, or tell the rollout side that the version stays."""
        version, unpublished = self.position.version, self.position.unpublished
        if publishes:
            self.position = Position(step=step, version=version + 1)
            await self._publisher.copy(version + 1)
            return
        self.position = Position(step=step, version=version, unpublished=unpublished + 1)
        if self.position.unpublished < self._interval or not self._waits:
            await self._rollout.commit_version(version)

    async def _publish(
        self, scope: asyncio.TaskGroup, step: int, ages: Mapping[int, int], metrics: dict[str, float], *, delivers: bool
    ) -> None:
        """Finish a step while the trainer continues: publication, metrics, evaluation."""
        try:
            if delivers:
                metrics |= _publication_metrics(await self._deliver(self.position.version))
        finally:  # it was trained, and may be in a checkpoint, even if the run ends here
            self._recorder.step(step, metrics, ages)
        self._start_evaluation(scope, step)

    async def _deliver(self, version: int) -> Publication:
        """Stage and deliver the weights that were copied and make the version visible."""
        await self._publisher.stage(version)
        await self._may_publish.wait()
        await self._gpus.for_generating()
        publication = await self._publisher.deliver(version)
        await self._rollout.commit_version(version)
        self._recorder.publication(publication)
        return publication

    async def _published(self, watch: Stopwatch) -> None:
        """Wait for the previous step's publication."""
        with watch.timed("wait"), watch.timed("publication_wait"):
            if self._publishing is not None:
                await self._publishing

    def _start_cut(self, scope: asyncio.TaskGroup, step: int, version: int) -> asyncio.Task[PreparedBatch]:
        return scope.create_task(self._rollout.next_batch(version), name=f"cut for step {step}")

    async def _repair_engines(self) -> None:
        """Bring engines that came (back) up to the current version without waiting for the next publication."""
        while True:
            await self._rollout.wait_for_joining()
            if repaired := await self._publisher.repair():
                log.info("engines repaired", engines=repaired)

    # ----------------------------------------------------------------------------------------- decisions
    async def _publishes_after(self, step: int, watch: Stopwatch) -> bool:
        """Decide whether to publish after ``step``: by interval; after the last step only for an evaluation (P6).

        With ``--stale-group-action wait``, a publication waits while it would make an attempt too old (C5). Groups
        trained since the last publication keep their slots meanwhile, so the trainer gets no more than its lead ahead
        of the engines, and then waits for those attempts.
        """
        if step == self._num_steps:
            return bool(self._evaluate_at(step))
        if self.position.unpublished + 1 < self._interval:
            return False
        if not self._waits:
            return True
        await self._published(watch)  # or attempts could be admitted under the version before this one
        if not (stale := await self._rollout.count_stale(self.position.version + 1)):
            return True
        log.info("publication waits", version=self.position.version + 1, attempts=stale)
        return False

    def _evaluate_at(self, step: int) -> Sequence[EvaluationSet]:
        """Data sets that are evaluated after ``step``."""
        if step in self._evaluations_asked:
            return self._held_out
        last = step == self._num_steps
        return [each for each in self._held_out if each.due(self._evaluation, step, last=last)]

    def _comparable(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Drop engine-against-trainer differences if the trainer is ahead of the published weights.

        With ``--update-weights-interval`` above 1, a sample of age 0 then rightly comes from other weights.
        """
        if not self.position.unpublished:
            return metrics
        return {name: value for name, value in metrics.items() if not name.startswith("logprob_diff")}

    def _check_age(self, batch: PreparedBatch, version: int) -> None:
        """Check C1 where it matters: the optimizer is about to step from ``version``."""
        if batch.target_version != version:
            raise ContractViolation(f"batch cut for version {batch.target_version}, but the trainer is at {version}")
        if self._bound is not None and version - batch.oldest_version > self._bound:
            raise ContractViolation(
                f"a sample of version {batch.oldest_version} would be trained from version {version}, "
                f"above --max-weight-staleness {self._bound}"
            )

    # ---------------------------------------------------------------------------------------- evaluation
    def _start_evaluation(self, scope: asyncio.TaskGroup, step: int) -> None:
        """Start an evaluation if one is due. It uses the version that is visible now: nothing is published until it
        is over, or until its own engines hold that version.
        """
        if held_out := self._evaluate_at(step):
            self._may_publish = asyncio.Event()
            work = self._evaluate(step, held_out, self._evaluating, self._may_publish)
            self._evaluating = scope.create_task(work, name=f"evaluation at step {step}")

    async def _evaluate(
        self,
        step: int,
        held_out: Sequence[EvaluationSet],
        before: asyncio.Task[None] | None,
        may_publish: asyncio.Event,
    ) -> None:
        try:
            if before is not None:
                await before  # on the same engines
            async with self._publisher.evaluating():
                if self._publisher.evaluates_apart and all(each.engines != "train" for each in held_out):
                    may_publish.set()
                metrics = await self._rollout.evaluate(step, [each.name for each in held_out])
        except Exception as error:  # supervision point: a failing evaluation never stops training (A9)
            log.warning("evaluation failed", step=step, error=repr(error))
        else:
            self._recorder.evaluation(step, metrics)
        finally:
            may_publish.set()


def _publication_metrics(publication: Publication) -> dict[str, float]:
    return {
        "publish/pause_seconds": publication.pause_seconds,
        "publish/copy_seconds": publication.copy_seconds,
        "publish/prepare_seconds": publication.prepare_seconds,
        "publish/canary_difference": publication.canary_difference,
        "publish/canary_undecided": len(publication.canary_undecided),
        "publish/compared_tensors": publication.compared_tensors,
        "publish/incomparable_tensors": publication.incomparable_tensors,
        "publish/bytes": publication.total_bytes,
        "publish/sent_fraction": publication.sent_fraction,
        **{f"publish/{name}_seconds": seconds for name, seconds in publication.step_seconds.items()},
    }
