"""Publication (C8): prepare → pause → flush unless in_place → begin → buckets → end → continue → verify → commit.

What rollouts feel is the time from pause to commit (``pause_seconds``); export and staging
(``prepare_seconds``) happen before it, while engines generate. Engines are continued in a ``finally``.

New requests wait at our side from pause to commit, so none of them meets an unverified engine. The canary
has to run after ``continue``: a paused SGLang answers no generation request. Requests already in flight go on
meanwhile; if the canary fails their engine is fenced and they are generated anew elsewhere.

An engine that fails at any step is fenced; the others go on. An engine that (re)starts is ``joining``: it
takes no requests until a publication, or :meth:`WeightPublisher.repair` between publications, has brought it
to the current version and the canary agrees. So there is one way for weights to reach an engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from enum import Enum

import msgspec
import structlog

from arguments.weights import WeightsArguments
from miles_async.clock import now
from miles_async.errors import PublicationError
from miles_async.protocols import EngineErrors, EngineFleet, TrainerSide
from miles_async.types import Publication, StagedWeights, TensorMeta
from miles_async.weights.verify import disagreement, max_difference

log = structlog.get_logger(__name__)


class PublicationState(Enum):
    """Where the publisher is; shown by the watchdog."""

    IDLE = "idle"
    PREPARING = "preparing"
    WAITING_FOR_ENGINES = "waiting for engines"
    CONNECTING = "connecting"
    PAUSING = "pausing"
    SENDING = "sending"
    VERIFYING = "verifying"


class WeightPublisher:
    """Owns the publication state machine; one publication or repair at a time."""

    def __init__(
        self,
        trainer: TrainerSide,
        fleet: EngineFleet,
        arguments: WeightsArguments,
        *,
        tolerance: float,
        backend: str,
        engines_timeout: float = 900.0,
        poll_seconds: float = 0.5,
    ) -> None:
        """``backend``: of the process group, "gloo" or "nccl". ``tolerance``: of the canary.

        ``engines_timeout``: seconds to wait while no engine is up; they may all be restarting.
        """
        self.state = PublicationState.IDLE
        self._trainer = trainer
        self._fleet = fleet
        self._arguments = arguments
        self._tolerance = tolerance
        self._backend = backend
        self._engines_timeout = engines_timeout
        self._poll_seconds = poll_seconds
        self._last_loss = "no engine was lost"  # for the message when none is left
        self._lock = asyncio.Lock()
        self._staged: deque[StagedWeights] = deque(maxlen=arguments.debug_publication_lag + 1)
        self._group: _Group | None = None
        self._groups_made = 0

    async def publish(self, version: int) -> Publication:
        """Bring every engine to the trainer's weights, named ``version``.

        Returns when at least one engine serves them, verified. Raises PublicationError past
        ``--publication-timeout``, which counts neither a repair under way nor waiting for engines to come up.
        """
        async with self._lock:
            try:
                async with self._deadline(f"version {version} was not exported"):
                    self.state = PublicationState.PREPARING
                    self._staged.append(await self._trainer.stage_weights(version))
                return await self._publish_staged(version)
            finally:
                self.state = PublicationState.IDLE

    async def repair(self) -> tuple[str, ...]:
        """Bring joining engines to the version that the others serve. Returns those that now serve."""
        async with self._lock:
            joining = (await self._fleet.members()).joining
            if not joining or not self._staged:
                return ()
            try:
                async with asyncio.timeout(self._arguments.publication_timeout):
                    return (await self._update(self._staged[0], joining)).present
            except TimeoutError:
                await self._fleet.fence(joining, "repair timed out (--publication-timeout)")
                return ()
            finally:
                self.state = PublicationState.IDLE

    async def close(self) -> None:
        """Leave the process group."""
        async with self._lock:
            await self._disconnect()

    async def _publish_staged(self, version: int) -> Publication:
        staged = self._staged[0]
        fenced: tuple[str, ...] = ()
        while True:
            engines = await self._wait_for_engines()
            async with self._deadline(f"version {version} was not published"):
                update = await self._update(staged, engines)
            fenced += update.absent
            if update.present:
                return Publication(
                    version=version,
                    sent_version=staged.version,
                    engines=update.present,
                    fenced=fenced,
                    prepare_seconds=staged.prepare_seconds,
                    pause_seconds=update.pause_seconds,
                    step_seconds=update.step_seconds,
                    canary_difference=update.canary_difference,
                )

    @asynccontextmanager
    async def _deadline(self, failure: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._arguments.publication_timeout):
                yield
        except TimeoutError as error:
            raise PublicationError(
                f"{failure} within {self._arguments.publication_timeout:g} s (--publication-timeout); "
                f"last state: {self.state.value}; {self._last_loss}"
            ) from error

    async def _wait_for_engines(self) -> tuple[str, ...]:
        self.state = PublicationState.WAITING_FOR_ENGINES
        members = await self._fleet.members()
        if not (members.serving or members.joining):
            log.warning("no engine to publish to; waiting", starting=members.starting)
        try:
            async with asyncio.timeout(self._engines_timeout):
                while not (engines := (*members.serving, *members.joining)):
                    await asyncio.sleep(self._poll_seconds)
                    members = await self._fleet.members()
                return engines
        except TimeoutError as error:
            raise PublicationError(
                f"the trainer waited {self._engines_timeout:g} s for an engine to publish to; starting: "
                f"{members.starting or 'none'}; {self._last_loss}"
            ) from error

    async def _update(self, staged: StagedWeights, engines: Sequence[str]) -> _Update:
        """Send ``staged`` to ``engines``, verify, admit. Who fails is absent from the result."""
        update = _Update(self._fleet, engines)
        await update.each("probe", self._fleet.probe)
        await self._connect(update, blame=False)
        started = now()
        try:
            self.state = PublicationState.PAUSING
            mode = self._arguments.pause_generation_mode
            await update.each("pause", lambda present: self._fleet.pause(present, mode))
            if mode != "in_place":  # there in-flight requests keep their cache, and SGLang refuses to flush
                await update.each("flush_cache", self._fleet.flush_cache)
            await self._deliver(staged, update)
        finally:
            await update.each("continue", self._fleet.resume)
        await self._verify(staged, update)
        self._last_loss = update.last_loss or self._last_loss
        if update.present:
            with update.timed("admit"):
                await self._fleet.admit(update.present, staged.version)
        update.pause_seconds = now() - started
        return update

    async def _deliver(self, staged: StagedWeights, update: _Update) -> None:
        """All buckets to everyone; who is lost on the way is absent then.

        A member that fails breaks the group for all, and whose fault it was can't be told from outside. So those
        that still answer get everything again together (they stay paused, since they hold a part of the new
        weights), and if that breaks too, each in a group of its own: who fails alone is fenced.
        """
        for _ in range(2):
            if await self._send(staged, update, blame=len(update.present) == 1):
                return
            await self._disconnect()
            await self._fleet.end_update(update.present)  # of those that had begun; a session must not stay open
            await update.each("probe", self._fleet.probe)
        for engine in update.present:
            alone = _Update(self._fleet, [engine], update.step_seconds)
            await self._send(staged, alone, blame=True)
            await self._disconnect()
            if not alone.present:
                update.note_loss(engine, alone.last_loss)

    async def _connect(self, update: _Update, *, blame: bool) -> bool:
        """One process group of the sending rank and exactly these engines; kept while they stay the same."""
        if self._group is not None and set(self._group.engines) == set(update.present):
            return True
        self.state = PublicationState.CONNECTING
        await self._disconnect()
        engines, fleet = update.present, self._fleet
        if not engines:
            return False
        ranks = (await fleet.members()).ranks
        world_size = 1 + sum(ranks.get(engine, 1) for engine in engines)
        self._groups_made += 1
        name = f"weights-{self._groups_made}"
        address, port = await self._trainer.open_group(name, world_size)
        self._group = _Group(name=name, engines=engines)

        async def connect(present: Sequence[str]) -> EngineErrors:
            return await fleet.connect(present, name, address, port, world_size, self._backend)

        async with asyncio.TaskGroup() as scope:
            scope.create_task(self._trainer.join_group(name))
            joined = scope.create_task(update.each("connect", connect, blame=blame))
        if not joined.result():
            await self._disconnect()
        return joined.result()

    async def _disconnect(self) -> None:
        if self._group is None:
            return
        group, self._group = self._group, None
        await self._trainer.leave_group(group.name)
        # Errors don't matter here: who is gone has left, and who can't leave fails the next connect.
        await self._fleet.disconnect(group.engines, group.name)

    async def _send(self, staged: StagedWeights, update: _Update, *, blame: bool) -> bool:
        """All buckets to all present engines; False as soon as one of them fails, fenced if it is to ``blame``."""
        if not update.present or not await self._connect(update, blame=blame):
            return False
        self.state = PublicationState.SENDING
        if not await update.each("begin", self._fleet.begin_update, blame=blame):
            return False
        for index, tensors in enumerate(staged.buckets):
            if not await self._send_bucket(staged.version, index, tensors, update, blame=blame):
                return False
        return await update.each("end", self._fleet.end_update, blame=blame)

    async def _send_bucket(
        self, version: int, index: int, tensors: Sequence[TensorMeta], update: _Update, *, blame: bool
    ) -> bool:
        """Both ends at once: the trainer broadcasts while the engines receive."""
        assert self._group is not None
        name, flush = self._group.name, self._arguments.pause_generation_mode != "in_place"

        async def receive(present: Sequence[str]) -> EngineErrors:
            return await self._fleet.receive_bucket(present, name, tensors, version, flush)

        async with asyncio.TaskGroup() as scope:
            scope.create_task(self._trainer.send_bucket(name, version, index))
            received = scope.create_task(update.each("send", receive, blame=blame))
        return received.result()

    async def _verify(self, staged: StagedWeights, update: _Update) -> None:
        """Fence every engine whose canary disagrees."""
        if self._arguments.verify_weights == "off" or not update.present:
            return
        self.state = PublicationState.VERIFYING
        with update.timed("canary"):
            scores = await self._fleet.score(update.present, staged.canary_tokens)
        for engine, score in scores.items():
            if isinstance(score, Exception):
                await update.lose(engine, f"canary: {score}")
            elif reason := disagreement(staged, score, self._tolerance):
                await update.lose(engine, reason)
            else:
                update.canary_difference = max(update.canary_difference, max_difference(staged, score))


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    engines: tuple[str, ...]


class _Update:
    """One update under way: who fails a step is fenced and not called again; steps are timed."""

    def __init__(
        self, fleet: EngineFleet, engines: Sequence[str], step_seconds: dict[str, float] | None = None
    ) -> None:
        self.present = tuple(engines)
        self.absent: tuple[str, ...] = ()
        self.last_loss = ""  # who was lost last, and why
        self.step_seconds: dict[str, float] = {} if step_seconds is None else step_seconds
        self.pause_seconds = 0.0
        self.canary_difference = 0.0
        self._fleet = fleet

    async def each(
        self, step: str, call: Callable[[Sequence[str]], Awaitable[EngineErrors]], *, blame: bool = True
    ) -> bool:
        """Run one step on everyone present. True if nobody failed; who failed is fenced if it is to ``blame``."""
        if not self.present:
            return False
        with self.timed(step):
            results = await call(self.present)
        failures = {engine: error for engine, error in results.items() if error}
        for engine, error in failures.items():
            if blame:
                await self.lose(engine, f"{step}: {error}")
            else:
                log.warning("publication step failed", step=step, engine=engine, error=str(error))
        return not failures

    async def lose(self, engine: str, reason: str) -> None:
        """Fence ``engine``."""
        log.warning("engine fenced", engine=engine, reason=reason)
        await self._fleet.fence([engine], reason)
        self.note_loss(engine, f"{engine} was lost: {reason}")

    def note_loss(self, engine: str, why: str) -> None:
        """``engine`` is fenced."""
        self.present = tuple(e for e in self.present if e != engine)
        self.absent = (*self.absent, engine)
        self.last_loss = why

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add the seconds inside to ``step``."""
        started = now()
        try:
            yield
        finally:
            self.step_seconds[step] = self.step_seconds.get(step, 0.0) + now() - started
