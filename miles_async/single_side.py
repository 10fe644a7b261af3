"""Loops that run one side without the other (``--eval-only``, ``--debug-rollout-only``, ``--debug-train-only``).

``controller.py`` has the loop with both. Here no weights move: no version changes, and nothing waits for a
publication (P7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from miles_async.bad_steps import BadSteps
from miles_async.runtime.clock import Stopwatch
from miles_async.seams import EngineFleet, Recorder, RolloutSide, TrainerSide
from miles_async.types import PreparedBatch, TokenScores

log = structlog.get_logger(__name__)

CHECKPOINT_VERSION = 0
"""Version of the weights that engines load when they start, where nothing is published."""

SHOW_SECONDS = 10.0

Show = Callable[[int], None]


async def rollouts_alone(rollout: RolloutSide, fleet: EngineFleet, recorder: Recorder, steps: int) -> None:
    """Cut ``steps`` batches without training them. The ledger counts their groups as trained: so they leave the pool.

    Raises the first error of the rollout side.
    """
    async with asyncio.TaskGroup() as scope:
        running = scope.create_task(rollout.run(), name="rollout")
        admission = scope.create_task(_admit_engines(rollout, fleet), name="admission")
        await rollout.commit_version(CHECKPOINT_VERSION)
        for step in range(1, steps + 1):
            watch = Stopwatch()
            with watch.timed("step"), watch.timed("wait"):
                batch = await rollout.next_batch(CHECKPOINT_VERSION)
                await rollout.trained(batch.batch_id)
                await rollout.commit_version(CHECKPOINT_VERSION)
            recorder.step(step, {**batch.metrics, **watch.metrics("time")}, batch.ages)
        admission.cancel()
        await rollout.close()
        await running


async def evaluation_alone(rollout: RolloutSide, fleet: EngineFleet, recorder: Recorder, show: Show) -> None:
    """Evaluate once the weights that engines load when they start. Raises the first error of the rollout side.

    ``show``: called every few seconds with the number of samples that have ended.
    """
    async with asyncio.TaskGroup() as scope:
        running = scope.create_task(rollout.run(), name="rollout")
        parallel = [
            scope.create_task(_admit_engines(rollout, fleet), name="admission"),
            scope.create_task(_show(rollout, show), name="progress"),
        ]
        recorder.evaluation(0, await rollout.evaluate(0))
        for task in parallel:
            task.cancel()
        await rollout.close()
        await running


async def _show(rollout: RolloutSide, show: Show) -> None:
    while True:
        await asyncio.sleep(SHOW_SECONDS)
        show(await rollout.evaluated())


async def _admit_engines(rollout: RolloutSide, fleet: EngineFleet) -> None:
    """Route requests to engines that come (back) up: they have loaded what they are to serve."""
    while True:
        await rollout.wait_for_joining()
        joining = (await fleet.members()).joining
        for engine, error in (await fleet.admit(joining, CHECKPOINT_VERSION)).items():
            if error is not None:
                log.warning("engine is restarted", engine=str(engine), error=str(error))
                await fleet.fence([engine], f"not admitted: {error}")


Batches = Callable[[int], Awaitable[PreparedBatch]]
"""The batch of a step, which counts from 1."""

Save = Callable[[int], Awaitable[None]]
"""Saves a checkpoint after so many steps, if one is due."""

Trained = Callable[[int, Sequence[TokenScores]], None]
"""(step, scores of its branches that are shown)"""


async def training_alone(
    trainer: TrainerSide,
    batches: Batches,
    recorder: Recorder,
    bad_steps: BadSteps,
    *,
    first: int,
    steps: int,
    save: Save | None = None,
    trained: Trained | None = None,
) -> None:
    """Train on the batches of the steps after ``first``, up to ``steps``. Raises the first error of the trainer."""
    for step in range(first + 1, steps + 1):
        watch = Stopwatch()
        with watch.timed("step"):
            with watch.timed("wait"):
                batch = await batches(step)
            with watch.timed("train"):
                metrics = await trainer.train(batch.shards)
                bad_steps.judge(batch, metrics)
        if trained is not None:
            trained(step, trainer.token_scores)
        of_trainer = {f"train/{name}": value for name, value in metrics.items()}
        recorder.step(step, {**batch.metrics, **of_trainer, **watch.metrics("time")}, batch.ages)
        if save is not None:
            await save(step)
