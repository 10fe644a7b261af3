"""Evaluation on held-out prompts, by the same engines and the same Generate as training rollouts.

The controller publishes no weights while an evaluation runs (R4), so all its samples come from one version, which
the metrics name. One that gets stuck is given up, since training would wait for it. Prompts are read as they are needed
and only sums are kept, so memory doesn't grow with the data sets (R6).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import structlog

from miles_async.algorithms.advantages.rewards import with_reward, with_rewards
from miles_async.api import EngineClient, Generate, GroupReward, Reward
from miles_async.errors import StalledError
from miles_async.evaluation.totals import Totals
from miles_async.runtime.clock import now
from miles_async.runtime.services import Circuit, Services
from miles_async.runtime.tasks import first_of
from miles_async.runtime.user_code import run_user_code
from miles_async.samples.evaluation import EvaluationSamples
from miles_async.types import Attempt, Prompt, Sample

log = structlog.get_logger(__name__)

Record = Callable[[int], EvaluationSamples]
"""Rollout steps before the pass → recorder of its samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """Held-out prompts, and how they are answered."""

    prompts: Callable[[], Iterable[Prompt]]  # every prompt once
    client: EngineClient
    generate: Generate
    reward: Reward | None  # None: what generate gives, or the group's alone
    n_samples: int  # per prompt
    group_reward: GroupReward | None = None


@dataclass(kw_only=True, slots=True)
class _AskedPrompt:
    """One prompt while its samples are made."""

    name: str  # of the data set
    data_set: DataSet
    totals: Totals  # of the data set
    attempt: Attempt
    ended: int = 0  # samples, failed ones too
    samples: dict[int, Sample] = field(default_factory=dict)  # by index, waiting for the reward of their group
    rewards: list[float] = field(default_factory=list)


class Evaluator:
    def __init__(
        self,
        data_sets: Mapping[str, DataSet],
        *,
        concurrency: int,
        service: Circuit,
        services: Services,
        stall_timeout: float,
        record: Record | None = None,
    ) -> None:
        """``concurrency``: most samples in flight. ``service``: circuit of the services that ``generate`` needs besides
        engines. ``services``: services whose outages pause the clock of ``stall_timeout``.
        ``stall_timeout``: seconds that may pass without the end of a sample. ``record``: keeps the samples of a pass.
        """
        self._data_sets = data_sets
        self._concurrency = concurrency
        self._service = service
        self._services = services
        self._stall_timeout = stall_timeout
        self._record = record
        self.ended = 0  # samples of the pass
        self._recorded: EvaluationSamples | None = None  # of the pass
        self._last_end = 0.0  # of a sample

    async def run(self, step: int, data_sets: Collection[str] | None = None) -> dict[str, float]:
        """Run one pass after ``step`` rollout steps, over the data sets of these names; None: over all.

        Returns ``eval/NAME/...``, and if all were evaluated ``eval/reward``, the mean reward averaged over them.

        A sample that fails is counted and left out of the means; it ends nothing (A9). Raises StalledError when none
        ends for ``--stall-timeout``.
        """
        self._last_end = now()
        self.ended = 0
        self._recorded = recorded = None if self._record is None else self._record(step)
        complete = False
        try:
            metrics = await first_of(self._evaluate(data_sets), self._until_stalled())
            complete = True
        finally:
            if recorded is not None:
                recorded.close(complete=complete)
        return metrics

    async def _evaluate(self, data_sets: Collection[str] | None) -> dict[str, float]:
        metrics: dict[str, float] = {}
        async with asyncio.TaskGroup() as scope:
            totals = await self._generate_all(scope, data_sets)
        for name, data_set_totals in totals.items():
            metrics |= {f"eval/{name}/{key}": value for key, value in data_set_totals.metrics().items()}
        rewards = [value for key, value in metrics.items() if key.endswith("/reward/mean")]
        of_all = rewards and len(rewards) == len(self._data_sets)
        return metrics | ({"eval/reward": sum(rewards) / len(rewards)} if of_all else {})

    async def _generate_all(self, scope: asyncio.TaskGroup, data_sets: Collection[str] | None) -> dict[str, Totals]:
        """Start each sample as soon as a slot is free; the totals are complete when the scope ends."""
        slots = asyncio.Semaphore(self._concurrency)
        totals: dict[str, Totals] = {}
        attempt_ids = itertools.count(-1, -1)  # negative: never a training attempt
        for name, data_set in self._data_sets.items():
            if data_sets is not None and name not in data_sets:
                continue
            totals[name] = Totals(data_set.n_samples)
            remaining = iter(data_set.prompts())
            while (prompt := await asyncio.to_thread(next, remaining, None)) is not None:
                attempt = Attempt(attempt_id=next(attempt_ids), prompt=prompt, epoch=0)
                asked = _AskedPrompt(name=name, data_set=data_set, totals=totals[name], attempt=attempt)
                if self._recorded is not None:
                    self._recorded.ask(name, data_set.n_samples)
                for index in range(data_set.n_samples):
                    await slots.acquire()
                    scope.create_task(self._one_sample(asked, index, slots))
        return totals

    async def _until_stalled(self) -> NoReturn:
        while (idle := self._idle_seconds()) < self._stall_timeout:  # noqa: ASYNC110  (it waits for time to pass)
            await asyncio.sleep(self._stall_timeout - idle)
        raise StalledError(
            f"training waits for an evaluation, and none of its samples ended for {self._stall_timeout:g} s "
            "(--stall-timeout)"
        )

    def _idle_seconds(self) -> float:
        """Seconds since a sample ended, excluding outages."""
        return now() - max(self._last_end, self._services.paused_until())

    async def _one_sample(self, asked: _AskedPrompt, index: int, slots: asyncio.Semaphore) -> None:
        try:
            with _supervised(asked):
                sample = await self._sample(asked, index)
                if asked.data_set.group_reward is None:
                    self._finished(asked, index, sample)
                else:
                    asked.samples[index] = sample
            asked.ended += 1
            if asked.ended == asked.data_set.n_samples:
                with _supervised(asked):
                    await self._reward_group(asked)
                asked.totals.end_prompt(asked.rewards)
        finally:
            self._last_end = now()
            self.ended += 1
            slots.release()

    async def _sample(self, asked: _AskedPrompt, index: int) -> Sample:
        """One sample, without the reward of its group."""
        data_set, prompt = asked.data_set, asked.attempt.prompt
        generate = partial(data_set.generate, data_set.client, asked.attempt, index)
        sample = await self._service.call(lambda: run_user_code(generate()))
        if data_set.reward is None:
            return sample
        return with_reward(sample, await run_user_code(data_set.reward(prompt, sample)))

    async def _reward_group(self, asked: _AskedPrompt) -> None:
        """Finish the samples that wait for the group's reward."""
        if (reward := asked.data_set.group_reward) is None or not asked.samples:
            return
        samples = [*asked.samples.values()]
        rewarded = with_rewards(samples, await run_user_code(reward(asked.attempt.prompt, samples)))
        for index, sample in zip(asked.samples, rewarded, strict=True):
            self._finished(asked, index, sample)

    def _finished(self, asked: _AskedPrompt, index: int, sample: Sample) -> None:
        asked.totals.add(sample)
        asked.rewards.append(sample.reward or 0.0)
        if self._recorded is not None:
            self._recorded.add(asked.name, asked.attempt, index, sample, samples=asked.data_set.n_samples)


@contextmanager
def _supervised(asked: _AskedPrompt) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # supervision point: one sample of an evaluation is no reason to end a run
        log.warning("evaluation sample failed", prompt_id=asked.attempt.prompt.prompt_id, error=repr(error))
