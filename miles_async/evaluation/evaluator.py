"""Evaluation on held-out prompts, by the same engines and the same Generate as training rollouts.

It pins nothing itself: the controller publishes no weights while an evaluation runs (R4), so all its
samples come from one version. Only sums are kept, so memory doesn't grow with the evaluation set (R6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from miles_async.protocols import EngineClient, Generate, Reward
from miles_async.types import Attempt, Prompt

log = structlog.get_logger(__name__)


class Evaluator:
    """Mean reward, pass@n and mean length over a fixed set of prompts."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        client: EngineClient,
        generate: Generate,
        reward: Reward,
        *,
        n_samples: int,
        concurrency: int,
    ) -> None:
        """``concurrency``: samples in flight at most."""
        self._prompts = prompts
        self._client = client
        self._generate = generate
        self._reward = reward
        self._n_samples = n_samples
        self._concurrency = concurrency

    async def run(self) -> dict[str, float]:
        """One pass. A failing sample is counted and left out of the means; it ends nothing (C9)."""
        totals = _Totals()
        queue = iter(enumerate(self._prompts))

        async def worker() -> None:
            for index, prompt in queue:
                await self._one_prompt(index, prompt, totals)

        async with asyncio.TaskGroup() as scope:
            for _ in range(min(max(1, self._concurrency // self._n_samples), len(self._prompts))):
                scope.create_task(worker())
        return totals.metrics()

    async def _one_prompt(self, index: int, prompt: Prompt, totals: _Totals) -> None:
        attempt = Attempt(attempt_id=-1 - index, prompt=prompt, epoch=0)  # negative: never a training attempt
        async with asyncio.TaskGroup() as scope:
            tasks = [scope.create_task(self._one_sample(attempt, i)) for i in range(self._n_samples)]
        totals.add([task.result() for task in tasks])

    async def _one_sample(self, attempt: Attempt, index: int) -> tuple[float, int] | None:
        try:
            sample = await self._generate(self._client, attempt, index)
            reward = await self._reward(attempt.prompt, sample)
        except Exception as error:  # supervision point: one sample of an evaluation is no reason to end a run
            log.warning("evaluation sample failed", prompt_id=attempt.prompt.prompt_id, error=repr(error))
            return None
        return reward, len(sample.tokens) - sample.prompt_length


class _Totals:
    def __init__(self) -> None:
        self.samples = self.failed = self.prompts = self.passed = self.tokens = 0
        self.reward = 0.0

    def add(self, results: Sequence[tuple[float, int] | None]) -> None:
        good = [result for result in results if result is not None]
        self.failed += len(results) - len(good)
        if not good:
            return
        self.prompts += 1
        self.passed += max(reward for reward, _ in good) >= 1.0
        self.samples += len(good)
        self.reward += sum(reward for reward, _ in good)
        self.tokens += sum(length for _, length in good)

    def metrics(self) -> dict[str, float]:
        return {
            "eval/accuracy": self.reward / max(self.samples, 1),
            "eval/pass_at_n": self.passed / max(self.prompts, 1),
            "eval/response_length": self.tokens / max(self.samples, 1),
            "eval/samples": float(self.samples),
            "eval/failed_samples": float(self.failed),
        }
