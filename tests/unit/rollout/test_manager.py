"""In which order the rollout side ends."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from miles_async.rollout.manager import RolloutManager


class Parts:
    """Engines, a dispatcher, an evaluation and a reward in one, which notes what of it ended."""

    def __init__(self, *, close_error: Exception | None = None) -> None:
        self.ended: list[str] = []
        self.evaluating = asyncio.Event()
        self._close_error = close_error
        self.manager = RolloutManager(
            engines=self,  # type: ignore[arg-type]
            source=None,  # type: ignore[arg-type]
            dispatcher=self,  # type: ignore[arg-type]
            batches=None,  # type: ignore[arg-type]
            evaluator=Evaluation(self),
            close_reward=self.close_reward,
            put=lambda shard: shard,
        )
        self.manager.stats = Mock()  # type: ignore[method-assign]

    def stats(self) -> Mock:
        return Mock(busy_seconds=0.0)

    async def run(self) -> None:
        await asyncio.Event().wait()

    supervise = run

    async def stop(self) -> None:
        self.ended.append("engines")

    async def close_reward(self) -> None:
        self.ended.append("reward")
        if self._close_error is not None:
            raise self._close_error


class Evaluation:
    """Never gets done."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    ended = 7

    async def run(self, step: int, data_sets: object = None) -> dict[str, float]:
        self._parts.evaluating.set()
        try:
            return await asyncio.Future()
        finally:
            await asyncio.sleep(0.01)  # its requests are aborted
            self._parts.ended.append("evaluation")


@pytest.mark.parametrize("error", [None, RuntimeError("a user's close")])
async def test_the_reward_ends_and_then_the_engines_whatever_that_raises(error: Exception | None) -> None:
    # covers: C10
    parts = Parts(close_error=error)
    with pytest.raises(RuntimeError) if error else nullcontext():
        await parts.manager.stop()
    assert parts.ended == ["reward", "engines"]


async def test_an_evaluation_ends_before_its_engines() -> None:
    # covers: C10
    parts = Parts()
    running = asyncio.create_task(parts.manager.run())
    asked = asyncio.create_task(parts.manager.evaluate(0))  # whoever asked is not told to end: Ray cancels nothing
    await parts.evaluating.wait()
    assert await parts.manager.evaluated() == 7
    await parts.manager.stop()
    await running
    assert parts.ended == ["evaluation", "reward", "engines"]
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_the_trainer_is_told_the_failure_while_the_rollout_side_still_ends() -> None:
    """Its groups have ended by then, which is not what went wrong."""
    # covers: C10
    parts, problem = Parts(), RuntimeError("no engine is left")
    ends = asyncio.Event()

    async def fails() -> None:
        raise problem

    async def dispatches() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.set()
            await asyncio.sleep(0.01)

    parts.run, parts.supervise = dispatches, fails  # type: ignore[method-assign]
    running = asyncio.create_task(parts.manager.run())
    await ends.wait()
    with pytest.raises(RuntimeError) as told:
        await parts.manager.trained(1)
    assert told.value is problem
    with pytest.raises(RuntimeError, match="no engine is left"):
        await running
