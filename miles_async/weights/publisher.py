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
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

import msgspec
import structlog

from arguments import WeightsArguments
from miles_async.errors import PublicationError
from miles_async.protocols import EngineErrors, EngineFleet, TrainerSide
from miles_async.types import StagedWeights
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


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """What one publication did."""

    version: int  # the version that became visible
    sent_version: int  # differs from version only under --debug-publication-lag
    engines: tuple[str, ...]
    fenced: tuple[str, ...]
    prepare_seconds: float
    pause_seconds: float
    canary_difference: float  # largest over engines, 0 when not verified


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
        poll_seconds: float = 0.5,
    ) -> None:
        """``backend``: of the process group, "gloo" or "nccl"; ``tolerance``: of the canary."""
        self.state = PublicationState.IDLE
        self._trainer = trainer
        self._fleet = fleet
        self._arguments = arguments
        self._tolerance = tolerance
        self._backend = backend
        self._poll_seconds = poll_seconds
        self._lock = asyncio.Lock()
        self._staged: deque[StagedWeights] = deque(maxlen=arguments.debug_publication_lag + 1)
        self._group: _Group | None = None
        self._groups_made = 0

    async def publish(self, version: int) -> Publication:
        """Bring every engine to the trainer's weights, named ``version``.

        Returns when at least one engine serves them, verified. Raises PublicationError past
        ``--publication-timeout``.
        """
        try:
            async with asyncio.timeout(self._arguments.publication_timeout), self._lock:
                self.state = PublicationState.PREPARING
                self._staged.append(await self._trainer.stage_weights(version))
                return await self._publish_staged(version)
        except TimeoutError as error:
            raise PublicationError(
                f"version {version} was not published within {self._arguments.publication_timeout:g} s "
                f"(--publication-timeout); last state: {self.state.value}"
            ) from error
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
                    repaired, _, _ = await self._update(self._staged[0], joining)
            except TimeoutError:
                await self._fleet.fence(joining, "repair timed out (--publication-timeout)")
                return ()
            finally:
                self.state = PublicationState.IDLE
            return repaired

    async def close(self) -> None:
        """Leave the process group."""
        async with self._lock:
            await self._disconnect()

    async def _publish_staged(self, version: int) -> Publication:
        staged = self._staged[0]
        fenced: list[str] = []
        while True:
            engines = await self._wait_for_engines()
            started = time.monotonic()
            updated, newly_fenced, difference = await self._update(staged, engines)
            fenced += newly_fenced
            if updated:
                return Publication(
                    version=version,
                    sent_version=staged.version,
                    engines=updated,
                    fenced=tuple(fenced),
                    prepare_seconds=staged.prepare_seconds,
                    pause_seconds=time.monotonic() - started,
                    canary_difference=difference,
                )

    async def _wait_for_engines(self) -> tuple[str, ...]:
        self.state = PublicationState.WAITING_FOR_ENGINES
        waiting = False
        while True:
            members = await self._fleet.members()
            if engines := (*members.serving, *members.joining):
                return engines
            if not waiting:
                log.warning("no engine to publish to; waiting", starting=members.starting)
                waiting = True
            await asyncio.sleep(self._poll_seconds)

    async def _update(
        self, staged: StagedWeights, engines: Sequence[str]
    ) -> tuple[tuple[str, ...], tuple[str, ...], float]:
        """Send ``staged`` to ``engines`` and verify. Returns (serving now, fenced, canary difference)."""
        roll_call = _RollCall(self._fleet, engines)
        await self._connect(roll_call)
        try:
            self.state = PublicationState.PAUSING
            mode = self._arguments.pause_generation_mode
            await roll_call.each("pause", lambda present: self._fleet.pause(present, mode))
            if mode != "in_place":  # there in-flight requests keep their cache, and SGLang refuses to flush
                await roll_call.each("flush_cache", self._fleet.flush_cache)
            # A member lost while sending breaks the group for all, and the others hold a part of the new
            # weights: they stay paused and get everything again.
            while roll_call.present and not await self._send(staged, roll_call):
                await self._disconnect()
                await self._connect(roll_call)
        finally:
            await roll_call.each("continue_generation", self._fleet.resume)
        difference = await self._verify(staged, roll_call)
        if roll_call.present:
            await self._fleet.admit(roll_call.present, staged.version)
        return roll_call.present, roll_call.absent, difference

    async def _connect(self, roll_call: _RollCall) -> None:
        """One process group of the sending rank and exactly these engines; kept while they stay the same."""
        if self._group is not None and set(self._group.engines) == set(roll_call.present):
            return
        self.state = PublicationState.CONNECTING
        await self._disconnect()
        while roll_call.present:
            engines = roll_call.present
            ranks = (await self._fleet.members()).ranks
            world_size = 1 + sum(ranks.get(engine, 1) for engine in engines)
            self._groups_made += 1
            name = f"weights-{self._groups_made}"
            address, port = await self._trainer.open_group(name, world_size)
            self._group = _Group(name=name, engines=engines)
            async with asyncio.TaskGroup() as scope:
                scope.create_task(self._trainer.join_group(name))
                joined = scope.create_task(
                    roll_call.each(
                        "init_weights_update_group",
                        lambda present, name=name, world_size=world_size: self._fleet.connect(
                            present, name, address, port, world_size, self._backend
                        ),
                    )
                )
            if joined.result():
                return
            await self._disconnect()

    async def _disconnect(self) -> None:
        if self._group is None:
            return
        group, self._group = self._group, None
        await self._trainer.leave_group(group.name)
        # Errors don't matter here: who is gone has left, and who can't leave fails the next connect.
        await self._fleet.disconnect(group.engines, group.name)

    async def _send(self, staged: StagedWeights, roll_call: _RollCall) -> bool:
        """All buckets to all present engines; False as soon as one of them fails."""
        assert self._group is not None
        name = self._group.name
        self.state = PublicationState.SENDING
        if not await roll_call.each("begin_weight_update", self._fleet.begin_update):
            return False
        flush = self._arguments.pause_generation_mode != "in_place"
        for index, tensors in enumerate(staged.buckets):
            async with asyncio.TaskGroup() as scope:
                scope.create_task(self._trainer.send_bucket(name, staged.version, index))
                received = scope.create_task(
                    roll_call.each(
                        "update_weights_from_distributed",
                        lambda present, tensors=tensors: self._fleet.receive_bucket(
                            present, name, tensors, staged.version, flush
                        ),
                    )
                )
            if not received.result():
                return False
        return await roll_call.each("end_weight_update", self._fleet.end_update)

    async def _verify(self, staged: StagedWeights, roll_call: _RollCall) -> float:
        """Fence every engine whose canary disagrees. Returns the largest difference of the others."""
        if self._arguments.verify_weights == "off" or not roll_call.present:
            return 0.0
        self.state = PublicationState.VERIFYING
        scores = await self._fleet.score(roll_call.present, staged.canary_tokens)
        largest = 0.0
        for engine, score in scores.items():
            if isinstance(score, Exception):
                await roll_call.lose(engine, f"canary: {score}")
            elif reason := disagreement(staged, score, self._tolerance):
                await roll_call.lose(engine, reason)
            else:
                largest = max(largest, max_difference(staged, score))
        return largest


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    engines: tuple[str, ...]


class _RollCall:
    """The engines of one update: who fails a step is fenced and not called again."""

    def __init__(self, fleet: EngineFleet, engines: Sequence[str]) -> None:
        self.present = tuple(engines)
        self.absent: tuple[str, ...] = ()
        self._fleet = fleet

    async def each(self, step: str, call: Callable[[Sequence[str]], Awaitable[EngineErrors]]) -> bool:
        """Run one step on everyone present. True if nobody failed."""
        if not self.present:
            return False
        failures = {engine: error for engine, error in (await call(self.present)).items() if error}
        for engine, error in failures.items():
            await self.lose(engine, f"{step}: {error}")
        return not failures

    async def lose(self, engine: str, reason: str) -> None:
        """Fence ``engine``."""
        self.present = tuple(e for e in self.present if e != engine)
        self.absent = (*self.absent, engine)
        log.warning("engine fenced", engine=engine, reason=reason)
        await self._fleet.fence([engine], reason)
