"""The whole rollout side: engines, dispatcher and train data behind the RolloutSide protocol.

It lives in one Ray actor, on one event loop. It hands out batches: cut for a stated version, turned into flat
arrays, split over the trainer's data-parallel ranks and put into Ray's object store, so that tokens never pass
through the driver.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from miles_async.api import Metrics
from miles_async.errors import StalledError, first_error
from miles_async.ledger.queued_writer import QueuedWriter
from miles_async.rollout.checkpoint import RolloutSnapshot, read_snapshot, write_snapshot
from miles_async.rollout.dispatcher import Dispatcher
from miles_async.rollout.dumps import RolloutDump
from miles_async.runtime.clock import now
from miles_async.runtime.own_thread import OwnThread
from miles_async.runtime.stall_report import waiting_tasks
from miles_async.runtime.tasks import afterwards
from miles_async.samples.recorder import SampleRecorder
from miles_async.seams import PromptSource, Resumption
from miles_async.staleness.ledger import Ledger
from miles_async.staleness.pool import without_quarantine
from miles_async.train_data.batch_maker import BatchMaker
from miles_async.types import Changes, EngineStats, Group, PreparedBatch, RolloutStats, TokenScores, TrainShard

log = structlog.get_logger(__name__)


class Engines(Protocol):
    """Router, engines and client as the manager uses them; publications go to the fleet directly."""

    async def supervise(self) -> None: ...

    async def wait_for_joining(self) -> None: ...

    def stats(self) -> EngineStats: ...

    async def scale(self, group: str, engines: int) -> None: ...

    async def stop(self) -> None: ...


class Evaluation(Protocol):
    """The evaluator."""

    @property
    def ended(self) -> int: ...

    async def run(self, step: int, data_sets: Collection[str] | None = None) -> Metrics: ...


MAX_ATTEMPTS_SHOWN = 100
CLOSE_SECONDS = 5.0  # for attempts in flight to end as cancelled, before engines are stopped anyway


class RolloutManager:
    """Implements RolloutSide, whose docstrings hold."""

    def __init__(
        self,
        *,
        engines: Engines,
        source: PromptSource,
        dispatcher: Dispatcher,
        batches: BatchMaker,
        evaluator: Evaluation | None,
        close_reward: Callable[[], Awaitable[None]] | None = None,
        put: Callable[[TrainShard], object],
        writers: Sequence[QueuedWriter[Any]] = (),
        canary: tuple[int, ...] = (),
        dump: Callable[[RolloutDump], None] | None = None,
        samples: SampleRecorder | None = None,
    ) -> None:
        """``close_reward`` ends the processes that rewards started. ``put`` stores a shard and returns the reference
        that crosses processes (``ray.put``). ``writers`` record the events of the dispatcher's pool on disk.
        ``canary``: see :meth:`canary`. ``dump`` gets every batch, in a thread.
        """
        self._engines = engines
        self._source = source
        self._dispatcher = dispatcher
        self._batches = batches
        self._batch_thread = OwnThread("batches")
        self._evaluator = evaluator
        self._close_reward = close_reward
        self._put = put
        self._writers = writers
        self._canary = canary
        self._dump = dump
        self._samples = samples
        self._closed = asyncio.Event()
        self._over = asyncio.Event()
        self._over.set()
        self._evaluating: asyncio.Task[Metrics] | None = None  # the last one
        self._batch_ids = itertools.count(1)  # the steps that batches are for
        # Batches that the trainer has and has not stepped with yet, with the version they were cut for.
        self._cut: dict[int, tuple[tuple[Group, ...], int]] = {}
        self._counted = Ledger().balance()  # as of the last batch
        self._snapshot: RolloutSnapshot | None = None
        self._failure: BaseException | None = None  # the first of the parts that run
        self._first_commit: float | None = None
        self._seconds = self._busy_seconds = 0.0  # of the loop, once it is closed

    async def run(self) -> None:
        """Dispatch and supervise until :meth:`close`; raises the first error of either, or of a writer."""
        self._over.clear()
        try:
            async with asyncio.TaskGroup() as scope:
                parts = (self._dispatcher.run(), self._engines.supervise(), *(writer.run() for writer in self._writers))
                tasks = [scope.create_task(self._noting_failure(part)) for part in parts]
                await self._closed.wait()
                for task in tasks:
                    task.cancel()
            for writer in self._writers:
                await writer.settle(self._dispatcher.pool.balance())
        except BaseExceptionGroup as group:
            raise first_error(group) from None  # exception groups don't cross Ray well
        finally:
            await self._end_evaluation()
            for writer in self._writers:
                await writer.close()
            if self._samples is not None:
                await asyncio.to_thread(self._samples.finish)
            self._over.set()

    async def _noting_failure(self, part: Awaitable[None]) -> None:
        """Run a part; its failure ends what is live, before :meth:`run` can raise it."""
        try:
            await part
        except Exception as error:
            self._failure = self._failure or first_error(error)
            raise

    async def next_batch(self, target_version: int) -> PreparedBatch:
        """Cut, convert, split. Waits for groups; StalledError if none finishes for ``--stall-timeout``."""
        try:
            groups = await self._dispatcher.cut(target_version)
        except StalledError as error:
            engines = self._engines.stats()
            raise StalledError(
                f"{error}; {engines.engines}; {engines.in_flight} requests at engines, the oldest for "
                f"{engines.oldest_request_seconds:.0f} s"
            ) from None
        balance = self._dispatcher.pool.balance()
        ended, self._counted = balance.ended_since(self._counted), balance
        batch_id = next(self._batch_ids)
        self._cut[batch_id] = (groups, target_version)
        prepared = await self._batch_thread.run(
            self._batches.make, groups, target_version, batch_id=batch_id, put=self._put
        )
        if self._dump is not None:
            dumped = RolloutDump(rollout_id=batch_id, target_version=target_version, groups=groups)
            await asyncio.to_thread(self._dump, dumped)
        stats = self.stats()
        metrics = {
            **prepared.metrics,
            **{f"groups/{name}": count for name, count in ended.items()},
            **{f"rollout/{name}": value for name, value in stats.gauges.items()},
            **{f"router/{name}": value for name, value in stats.router.items()},
            **({} if self._batches.bound is None else {"age/bound": self._batches.bound}),
        }
        return msgspec.structs.replace(prepared, metrics=metrics)

    async def change(self, changes: Changes) -> None:
        self._batches = replace(self._batches, bound=changes.bound(self._batches.bound))
        await self._dispatcher.change(changes)

    async def trained(self, batch_id: int, scores: Sequence[TokenScores] = ()) -> None:
        """Record that the optimizer has stepped with this batch. ``scores``: of the branches that are shown. Raises the
        failure of this side, if there was one: the groups have ended with it.
        """
        if self._failure is not None:
            raise self._failure
        groups, target_version = self._cut.pop(batch_id)
        if self._samples is not None:
            self._samples.trained(batch_id, scores)
        self._dispatcher.pool.trained(groups, target_version)

    async def commit_version(self, version: int) -> None:
        """Mark ``version`` visible and free the slots of trained groups; the first call starts admission."""
        if self._first_commit is None:
            self._first_commit = now()
        await self._dispatcher.commit(version)

    async def count_stale(self, version: int) -> int:
        return self._dispatcher.pool.count_stale(version)

    async def wait_for_joining(self) -> None:
        await self._engines.wait_for_joining()

    async def evaluate(self, step: int, data_sets: Collection[str] | None = None) -> Metrics:
        """Evaluate these held-out data sets, or all of them; {} if there are none. :meth:`close` cancels it."""
        if self._evaluator is None:
            return {}
        self._evaluating = asyncio.create_task(self._evaluator.run(step, data_sets), name="evaluation")
        return await self._evaluating

    async def evaluated(self) -> int:
        return 0 if self._evaluator is None else self._evaluator.ended

    async def _end_evaluation(self) -> None:
        """Cancel the evaluation before its engines end. Its caller may be gone: Ray cancels nothing."""
        if self._evaluating is not None:
            self._evaluating.cancel()
            await asyncio.wait([self._evaluating])

    def stats(self) -> RolloutStats:
        """Statistics of the current state; after :meth:`close`, with its times."""
        pool, engines = self._dispatcher.pool, self._engines.stats()
        balance = pool.balance()
        return RolloutStats(
            balance=balance.summary(),
            gauges={
                "in_flight": balance.in_flight,
                "buffered": balance.buffered,
                "requests": engines.in_flight,
                "concurrency_limit": self._dispatcher.concurrency.slots.limit,
                "lead": pool.lead(),
                "lead_limit": pool.capacity,
                **self._dispatcher.services.gauges(),
            },
            router=engines.router,
            busy_seconds=self._busy_seconds if self._closed.is_set() else engines.busy_seconds,
            seconds=self._seconds if self._closed.is_set() else self._elapsed(),
        )

    async def describe(self) -> str:
        pool, engines = self._dispatcher.pool, self._engines.stats()
        attempts = [
            f"attempt {row.attempt_id} of {row.prompt_id}: {row.stage}, issued under version {row.issued_version}"
            for row in pool.live()
        ]
        if len(attempts) > MAX_ATTEMPTS_SHOWN:
            attempts[MAX_ATTEMPTS_SHOWN:] = [f"and {len(attempts) - MAX_ATTEMPTS_SHOWN} younger ones"]
        sections = {
            "pool": [pool.describe()],
            "engines": [engines.engines],
            "requests": [
                f"{engines.in_flight} at engines, the oldest for {engines.oldest_request_seconds:.0f} s; "
                f"{engines.failed_tries} failed so far"
            ],
            "services": self._dispatcher.services.describe() or ["none is down"],
            "live attempts": attempts,
            "tasks": waiting_tasks(),
        }
        return "\n".join(line for title, lines in sections.items() for line in (title, *(f"  {x}" for x in lines)))

    async def scale(self, group: str, engines: int) -> None:
        await self._engines.scale(group, engines)

    async def engines(self) -> str:
        return self._engines.stats().engines

    async def canary(self) -> tuple[int, ...]:
        return self._canary

    def _elapsed(self) -> float:
        return now() - self._first_commit if self._first_commit is not None else 0.0

    async def snapshot(self) -> None:
        """Snapshot what :meth:`save` will write: prompt cursor, owed attempts, finished groups."""
        self._snapshot = await self._dispatcher.snapshot()

    async def save(self, directory: Path) -> Mapping[str, str]:
        """Write the last snapshot, while rollouts and training continue. Return digests of its files.

        Raises CheckpointError.
        """
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None, "snapshot() comes first"
        return await asyncio.to_thread(write_snapshot, directory, snapshot)

    async def load(self, directory: Path, resumption: Resumption) -> None:
        """Restore a checkpoint; before :meth:`run`."""
        snapshot = await asyncio.to_thread(read_snapshot, directory)
        changes = await asyncio.to_thread(self._source.restore, snapshot.source)
        pool = snapshot.pool
        if changes:
            pool, prompt_ids = without_quarantine(pool)
            log.warning(
                "resumed with other prompts than were saved, by --load-anyway",
                changed=list(changes),
                no_longer_quarantined=prompt_ids,
            )
        accepted = (*resumption.accepted, *changes)
        self._dispatcher.restore(pool, msgspec.structs.replace(resumption, accepted=accepted))
        self._counted = self._dispatcher.pool.balance()
        self._batch_ids = itertools.count(resumption.step + 1)

    async def close(self) -> None:
        """End attempts in flight as cancelled; :meth:`run` returns. Time after this is not counted as idle."""
        if not self._closed.is_set():
            self._seconds, self._busy_seconds = self._elapsed(), self._engines.stats().busy_seconds
            self._closed.set()

    async def last_stats(self) -> RolloutStats:
        await self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._over.wait()
        return self.stats()

    async def stop(self) -> None:
        """Stop engines, router and rewards, after :meth:`close`, so that the ledger is complete."""
        await self.last_stats()
        async with afterwards(self._engines.stop):
            if self._close_reward is not None:
                await self._close_reward()
