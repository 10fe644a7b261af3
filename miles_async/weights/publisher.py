"""Publication: the trainer's weights are copied and staged while engines generate, then delivered to the engines.

An engine that (re)starts is ``joining``: it takes no requests until a publication, or :meth:`WeightPublisher.repair`
between publications, has brought it to the current version and it is verified. So there is one way for weights to reach
an engine (``update.py``), whatever the transport (``transports/``).

Only copying needs the trainer: staging and delivery work on the copy while training continues.

A repair delays no delivery: both may run at once, and the delivery leaves the repair's engines out. If another version
has become visible by the end of a repair, its engines get that version before the next delivery begins.

Engines that only evaluate get the version that is evaluated, and those that join during an evaluation get it, too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress

import structlog

from miles_async.arguments.weights import WeightsArguments
from miles_async.seams import TrainerSide, WeightSender
from miles_async.types import Incarnation, Publication, StagedWeights
from miles_async.weights.update import FleetUpdater, PublicationState, publication_deadline

log = structlog.get_logger(__name__)

ADMISSION_SECONDS = 10.0  # for repaired engines to be admitted: deliveries wait for that
JOINING_SECONDS = 1.0  # between looks at the engines of an evaluation


class WeightPublisher:
    """One delivery at a time, one repair at a time, and one version at most that is staged and not delivered."""

    def __init__(
        self,
        trainer: TrainerSide,
        engines: FleetUpdater,
        arguments: WeightsArguments,
        *,
        repairs: FleetUpdater,
        evaluation: FleetUpdater | None = None,
    ) -> None:
        """``repairs``: updates the same engines with a separate transport, so that both may be in use at once.
        ``evaluation``: updates engines that only evaluate; None if training's engines evaluate.
        """
        self._trainer = trainer
        self._engines = engines
        self._repairs = repairs
        self._evaluation = evaluation
        self._lock = asyncio.Lock()
        self._timeout = arguments.publication_timeout
        self._staging = False
        self._staged: deque[StagedWeights] = deque(maxlen=arguments.debug_publication_lag + 1)
        self._delivered: StagedWeights | None = None
        self._in_repair: tuple[Incarnation, ...] = ()

    @property
    def state(self) -> PublicationState:
        """Current step, for the watchdog."""
        return PublicationState.STAGING if self._staging else self._engines.state

    @property
    def evaluates_apart(self) -> bool:
        """True if evaluation has separate engines, so that publications don't disturb it."""
        return self._evaluation is not None

    async def copy(self, version: int) -> None:
        """Copy the trainer's weights. The version before must have been delivered.

        Raises PublicationError past ``--publication-timeout``.
        """
        async with self._staging_deadline(f"the trainer's export of version {version}"):
            await self._trainer.copy_weights(version)

    async def stage(self, version: int) -> None:
        """Write the copied weights to files while training continues.

        Raises PublicationError past ``--publication-timeout``.
        """
        async with self._staging_deadline(f"the files of version {version} at the sending ranks"):
            self._staged.append(await self._trainer.stage_weights(version))

    async def deliver(self, version: int) -> Publication:
        """Bring every engine to ``version``, which was staged last.

        Returns once at least one engine serves it, verified. Raises PublicationError past
        ``--publication-timeout``, which does not count waiting for engines to come up.
        """
        async with self._lock:
            self._delivered = self._staged[0]
            return await self._engines.publish(version, self._delivered, apart=lambda: self._in_repair)

    async def repair(self) -> tuple[str, ...]:
        """Bring joining engines to the version that the others serve. Returns the engines that now serve.

        Not before the first delivery.
        """
        async with self._lock:  # waits for a delivery under way, which includes the joining engines
            assert self._delivered is not None
            staged = self._delivered
            joining = (await self._repairs.fleet.members()).joining
            if not joining:
                return ()
            await self._tell_senders(WeightSender.pin, staged)  # before a delivery lets them remove it
            self._in_repair = joining
        overtaken = False

        @asynccontextmanager
        async def unless_overtaken() -> AsyncIterator[bool]:
            nonlocal overtaken
            self._in_repair = ()  # a delivery that waits for engines may take them
            async with self._lock, asyncio.timeout(ADMISSION_SECONDS):
                overtaken = self._delivered is not staged
                yield not overtaken

        try:
            repaired = await self._repairs.repair(staged, joining, unless_overtaken())
            await self._tell_senders(WeightSender.unpin, staged)
        finally:
            self._in_repair = ()
            self._engines.last_loss = self._repairs.last_loss or self._engines.last_loss
        if overtaken:
            async with self._lock:  # so that no delivery overtakes it this time
                waiting = set((await self._repairs.fleet.members()).joining)
                again = [engine for engine in repaired if engine in waiting]
                repaired = await self._repairs.repair(self._delivered, again, nullcontext(True))
        return tuple(map(str, repaired))

    @asynccontextmanager
    async def _staging_deadline(self, awaited: str) -> AsyncIterator[None]:
        """Allow ``--publication-timeout`` for a part of staging."""
        self._staging = True
        try:
            async with publication_deadline(self._timeout, awaited):
                yield
        finally:
            self._staging = False

    async def _tell_senders(self, keep: Callable[[WeightSender, int], None], staged: StagedWeights) -> None:
        """Have all senders pin or unpin that version."""
        awaited = f"the sending ranks, which are to {keep.__name__} version {staged.version}"
        async with publication_deadline(self._timeout, awaited):
            for index in range(staged.senders):
                await self._trainer.sender(index, repair=True).call(keep, staged.version)

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        """Bring the engines that only evaluate, if there are any, to the visible version, and within the context those
        that join. Raises PublicationError.
        """
        if self._evaluation is None or self._delivered is None:
            yield
            return
        async with self._lock:
            staged = self._delivered
            await self._tell_senders(WeightSender.pin, staged)
        try:
            async with self._lock:
                await self._evaluation.publish(staged.version, staged)
            async with self._repairs_of(self._evaluation, staged):
                yield
        except Exception:
            await self._tell_senders(WeightSender.unpin, staged)
            raise
        await self._tell_senders(WeightSender.unpin, staged)

    @asynccontextmanager
    async def _repairs_of(self, evaluation: FleetUpdater, staged: StagedWeights) -> AsyncIterator[None]:
        """Bring engines that join to ``staged``. A repair under way at the end is finished, unless cancelled."""
        over = asyncio.Event()
        repairs = asyncio.create_task(self._repair_evaluation(evaluation, staged, over), name="repair for evaluation")
        try:
            yield
        except asyncio.CancelledError:
            repairs.cancel()
            raise
        finally:
            over.set()
            await repairs

    async def _repair_evaluation(self, evaluation: FleetUpdater, staged: StagedWeights, over: asyncio.Event) -> None:
        """Bring engines that join to ``staged`` until ``over``."""
        while not over.is_set():
            try:
                async with self._lock:
                    if joining := (await evaluation.fleet.members()).joining:
                        repaired = await evaluation.repair(staged, joining, nullcontext(True))
                        log.info("engines repaired", engines=[*map(str, repaired)])
            except Exception as error:  # supervision point: other engines may serve, and these be repaired later
                log.warning("engines of the evaluation were not repaired", error=repr(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(JOINING_SECONDS):
                    await over.wait()

    async def close(self) -> None:
        """Release what the transports keep between deliveries."""
        async with self._lock:
            await self._engines.close()
            await self._repairs.close()
            if self._evaluation is not None:
                await self._evaluation.close()
