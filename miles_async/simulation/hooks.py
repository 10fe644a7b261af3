"""The rollout process and the parts of a run that users exchange, simulated: prompts, environments, rewards.

An environment and a reward take time in which engines generate nothing for the sample, and no token costs it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence

from miles_async.api import EngineClient, Generate
from miles_async.runtime.clock import now
from miles_async.simulation.engine import DECODER_ID, END_OF_TURN, PROMPT_TOKEN, simulated_text
from miles_async.simulation.settings import SimulationSettings
from miles_async.types import Attempt, JsonObject, Prompt, Sample


class SimulatedPrompts:
    """An endless source of prompts of one token."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        numbers = range(self._taken, self._taken + count)
        self._taken += count
        return [(0, Prompt(prompt_id=f"p{number}", token_ids=(PROMPT_TOKEN,), text="")) for number in numbers]

    def state(self) -> JsonObject:
        return {"taken": self._taken}

    def restore(self, state: JsonObject) -> Sequence[str]:
        self._taken = state["taken"]
        return ()


class SimulatedReward:
    """Takes its time; 0 or 1 by a coin."""

    def __init__(self, settings: SimulationSettings) -> None:
        self._seconds = settings.reward_seconds
        self._outage = settings.faults.reward_outage or (math.inf, math.inf)
        self._chance = random.Random(f"{settings.seed} rewards")

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        if seconds := self._seconds.draw(self._chance):
            await asyncio.sleep(seconds)
        if self._outage[0] <= now() < self._outage[1]:
            raise ConnectionRefusedError("the simulated reward service is down")
        return float(self._chance.random() < 0.5)


class RolloutProcess:
    """CPU time of the rollout process: one core takes answers in order of arrival, each for ``seconds_per_answer``.

    Engines and trainer do not wait for it.
    """

    def __init__(self, seconds_per_answer: float) -> None:
        self.busy_seconds = 0.0
        self.lags: list[float] = []  # seconds that each answer that is taken waited for its turn
        self._seconds = seconds_per_answer
        self._free = 0.0  # when all work so far is done

    async def take(self) -> None:
        """Wait until an answer has been taken."""
        if not self._seconds:
            return
        now = asyncio.get_running_loop().time()
        start = max(now, self._free)
        self._free = start + self._seconds
        await asyncio.sleep(self._free - now)
        self.busy_seconds += self._seconds
        self.lags.append(start - now)


class SimulatedDecoder:
    """Decodes as simulated engines do."""

    decoder_id = DECODER_ID

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.trim(simulated_text(len(token_ids)))

    def trim(self, text: str) -> str:
        return text.removesuffix(END_OF_TURN)


class SimulatedEpisode:
    """A Generate whose answer costs CPU time, with an environment that takes its time after it; a sample is in flight
    all the while.
    """

    def __init__(self, generate: Generate, process: RolloutProcess, settings: SimulationSettings) -> None:
        """``generate``: the response. ``process``: takes its answer."""
        self._generate = generate
        self._process = process
        self._seconds = settings.environment_seconds
        self._chance = random.Random(f"{settings.seed} environments")

    async def __call__(self, client: EngineClient, attempt: Attempt, sample_index: int) -> Sample:
        sample = await self._generate(client, attempt, sample_index)
        await self._process.take()
        if seconds := self._seconds.draw(self._chance):
            await asyncio.sleep(seconds)
        return sample
