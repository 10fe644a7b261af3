"""The rollout side, whole: engines, dispatcher and train data behind the RolloutSide protocol.

It lives in one Ray actor, on one event loop. It hands out batches: cut for a stated version, turned into flat
arrays, split over the trainer's data-parallel ranks and put into Ray's object store, so that tokens never pass
through the driver.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import structlog

from miles_async.errors import first_error
from miles_async.protocols import Metrics, PromptSource
from miles_async.rollout.batches import BatchMaker
from miles_async.rollout.dispatcher import Dispatcher
from miles_async.types import Group, PreparedBatch, TrainShard

log = structlog.get_logger(__name__)


class Engines(Protocol):
    """Router, engines and client as the manager uses them; publications go to the fleet directly."""

    async def supervise(self) -> None: ...

    async def wait_for_joining(self) -> None: ...

    def stats(self) -> Mapping[str, Any]: ...

    async def stop(self) -> None: ...


class Evaluation(Protocol):
    """The evaluator."""

    async def run(self) -> Metrics: ...


class RolloutManager:
    """Implements RolloutSide."""

    def __init__(
        self,
        *,
        engines: Engines,
        source: PromptSource,
        dispatcher: Dispatcher,
        batches: BatchMaker,
        evaluator: Evaluation | None,
        put: Callable[[TrainShard], Any],
    ) -> None:
        """``put`` stores a shard and returns the reference that crosses processes (``ray.put``)."""
        self._engines = engines
        self._source = source
        self._dispatcher = dispatcher
        self._batches = batches
        self._evaluator = evaluator
        self._put = put
        self._closed = asyncio.Event()
        self._batch_ids = itertools.count()
        self._cut: dict[
            int, tuple[tuple[Group, ...], int]
        ] = {}  # batches that the trainer has and hasn't stepped with yet
        self._first_commit: float | None = None

    async def run(self) -> None:
        """Dispatch and supervise until :meth:`close`; raises the first error of either."""
        try:
            async with asyncio.TaskGroup() as scope:
                tasks = [
                    scope.create_task(self._dispatcher.run()),
                    scope.create_task(self._engines.supervise()),
                ]
                await self._closed.wait()
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None  # exception groups don't cross Ray well

    async def next_batch(self, target_version: int) -> PreparedBatch:
        """Cut, convert, split. Waits for groups; StalledError if none finishes for ``--stall-timeout``."""
        groups = await self._dispatcher.cut(target_version)
        batch_id = next(self._batch_ids)
        self._cut[batch_id] = (groups, target_version)
        prepared = await asyncio.to_thread(self._batches.make, groups, target_version)
        references = await asyncio.to_thread(lambda: tuple(self._put(shard) for shard in prepared.shards))
        stats = await self.stats()
        return PreparedBatch(
            batch_id=batch_id,
            target_version=target_version,
            oldest_version=min(group.oldest_version for group in groups),
            shards=references,
            metrics={
                **prepared.metrics,
                **{f"rollout/{name}": value for name, value in stats["gauges"].items()},
            },
            ages=prepared.ages,
        )

    async def trained(self, batch_id: int) -> None:
        """The optimizer has stepped with this batch."""
        groups, target_version = self._cut.pop(batch_id)
        self._dispatcher.pool.trained(groups, target_version)

    async def commit_version(self, version: int) -> None:
        """``version`` is visible: what was trained makes room, and the first time the pool starts to fill."""
        if self._first_commit is None:
            self._first_commit = time.monotonic()
        await self._dispatcher.commit(version)

    async def wait_for_joining(self) -> None:
        """Returns when an engine waits for weights."""
        await self._engines.wait_for_joining()

    async def evaluate(self) -> Metrics:
        """One pass over the held-out prompts; {} without ``--eval-prompt-data``."""
        return await self._evaluator.run() if self._evaluator else {}

    async def stats(self) -> dict[str, Any]:
        """``balance`` of attempts (C2), ``gauges`` of now, ``busy_seconds`` and ``seconds`` since the first commit."""
        pool, engines = self._dispatcher.pool, self._engines.stats()
        balance = pool.balance()
        return {
            "balance": balance.summary(),
            "gauges": {
                "in_flight": balance.in_flight,
                "buffered": balance.buffered,
                "requests": engines["in_flight"],
                "lead": pool.lead(),
            },
            "busy_seconds": engines["busy_seconds"],
            "seconds": time.monotonic() - self._first_commit if self._first_commit is not None else 0.0,
        }

    async def state(self) -> dict[str, Any]:
        """Prompt cursor, owed attempts and balance, JSON-serializable."""
        return {"source": self._source.state(), "pool": self._dispatcher.pool.state()}

    async def restore(self, state: Mapping[str, Any], *, step: int) -> None:
        """Go on where ``state`` was taken, after ``step`` steps; before :meth:`run`."""
        await asyncio.to_thread(self._source.restore, state["source"])
        self._dispatcher.restore(state["pool"], step=step)

    async def close(self) -> None:
        """End what is in flight as cancelled; :meth:`run` returns."""
        self._closed.set()

    async def stop(self) -> None:
        """Engines and router down."""
        await self._engines.stop()
