"""Bring one fleet to staged weights (C8): choose the engines, wait for some to be up, keep deadlines, admit.

``--publish-order all`` updates all engines at once. ``rolling`` updates a few at a time and makes the version visible
when all of them are through; meanwhile requests go on under the version before (``engines/registry.py``).
``engine_update.py`` is what happens to the engines of one update.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
import structlog

from miles_async.arguments.weights import WeightsArguments
from miles_async.errors import PublicationError
from miles_async.seams import EngineFleet, WeightTransport
from miles_async.types import FleetMembers, Incarnation, Publication, StagedWeights
from miles_async.weights.deadline import publication_deadline
from miles_async.weights.engine_update import EngineUpdate, PublicationState, summarize
from miles_async.weights.verification import Verification

log = structlog.get_logger(__name__)

Admission = AbstractAsyncContextManager[bool]
"""Engines are admitted inside it, if it says so."""


class FleetUpdater:
    """Brings staged weights to the engines of one fleet. Not reentrant; callers must serialize."""

    def __init__(
        self,
        fleet: EngineFleet,
        transport: WeightTransport,
        arguments: WeightsArguments,
        *,
        tolerance: float,
        engines_timeout: float = 900.0,
        poll_seconds: float = 0.5,
    ) -> None:
        """``tolerance``: of the canary. ``engines_timeout``: seconds to wait while no engine is up; they may all be
        restarting.
        """
        self.state = PublicationState.IDLE  # for the watchdog
        self.last_loss = ""  # which engine was lost last, and why: for the message when none is left
        self._fleet = fleet
        self._transport = transport
        self._arguments = arguments
        self._verification = Verification(arguments, tolerance)
        self._engines_timeout = engines_timeout
        self._poll_seconds = poll_seconds

    async def publish(
        self, version: int, staged: StagedWeights, *, apart: Callable[[], Collection[Incarnation]] = tuple
    ) -> Publication:
        """Bring every engine to ``staged``, as ``version``. Returns once at least one serves it, verified.

        ``apart``: joining engines to leave out, since they are being repaired.

        Raises PublicationError past ``--publication-timeout``, which does not count waiting for engines to come up.
        """
        updates: list[EngineUpdate] = []
        try:
            while not any(update.left for update in updates):
                for engines in self._portions(await self._wait_for_engines(apart)):
                    async with self._deadline(version), self._updating(engines) as update:
                        updates.append(update)
                        await update.run(staged)
                        await update.admit(staged.version)
        finally:
            self.state = PublicationState.IDLE
        return summarize(version, staged, updates)

    async def joining(self) -> tuple[Incarnation, ...]:
        """Engines that wait for weights."""
        return (await self._fleet.members()).joining

    async def repair(
        self, staged: StagedWeights, joining: Sequence[Incarnation], admission: Admission
    ) -> tuple[Incarnation, ...]:
        """Bring joining engines to the version that the others serve. Returns those that hold it, verified.

        They are admitted if ``admission``, which is entered when they hold it, says so. Engines that take too long are
        fenced.
        """
        if not joining:
            return ()
        try:
            async with self._updating(joining) as update:
                async with asyncio.timeout(self._arguments.publication_timeout):
                    await update.run(staged)
                async with admission as admitted:
                    if admitted:
                        await update.admit(staged.version)
                repaired = update.left
        except TimeoutError:
            await self._fleet.fence(joining, "repair timed out (--publication-timeout)")
            repaired = ()
        finally:
            self.state = PublicationState.IDLE
        await self.close()  # the next delivery is to all engines, so nothing that was kept is of use
        return repaired

    async def close(self) -> None:
        """Release what the transport keeps between deliveries.

        Raises PublicationError past ``--publication-timeout``.
        """
        awaited = "engines and sending ranks to release what they keep between deliveries"
        async with publication_deadline(self._arguments.publication_timeout, awaited):
            await self._transport.close()

    @asynccontextmanager
    async def _updating(self, engines: Sequence[Incarnation]) -> AsyncIterator[EngineUpdate]:
        """An update of these engines; whom it lost is remembered, however it ends."""
        update = EngineUpdate(self._fleet, self._transport, self._arguments, self._verification, engines, self._enter)
        try:
            yield update
        finally:
            self.last_loss = update.last_loss or self.last_loss

    def _enter(self, state: PublicationState) -> None:
        self.state = state

    def _portions(self, members: FleetMembers) -> Iterator[tuple[Incarnation, ...]]:
        """The engines to update together. Joining engines come first: they stop nobody, and then more engines go on."""
        if self._arguments.publish_order == "all":
            yield (*members.serving, *members.joining)
            return
        if members.joining:
            yield members.joining
        at_once = self._arguments.rolling_engines
        for first in range(0, len(members.serving), at_once):
            yield members.serving[first : first + at_once]

    @asynccontextmanager
    async def _deadline(self, version: int) -> AsyncIterator[None]:
        """Allow ``--publication-timeout`` for the block."""
        try:
            async with asyncio.timeout(self._arguments.publication_timeout):
                yield
        except TimeoutError as error:
            raise PublicationError(
                f"version {version} was not published within {self._arguments.publication_timeout:g} s "
                f"(--publication-timeout); last state: {self.state.value}; {self.last_loss or 'no engine was lost'}"
            ) from error

    async def _wait_for_engines(self, apart: Callable[[], Collection[Incarnation]]) -> FleetMembers:
        self.state = PublicationState.WAITING_FOR_ENGINES
        members = await self._members(apart)
        if not (members.serving or members.joining):
            log.warning("no engine to publish to; waiting", starting=members.starting)
        try:
            async with asyncio.timeout(self._engines_timeout):
                while not (members.serving or members.joining):
                    await asyncio.sleep(self._poll_seconds)
                    members = await self._members(apart)
                return members
        except TimeoutError as error:
            raise PublicationError(
                f"the trainer waited {self._engines_timeout:g} s for an engine to publish to; starting: "
                f"{members.starting or 'none'}; {self.last_loss or 'no engine was lost'}"
            ) from error

    async def _members(self, apart: Callable[[], Collection[Incarnation]]) -> FleetMembers:
        members = await self._fleet.members()
        joining = tuple(engine for engine in members.joining if engine not in apart())
        return msgspec.structs.replace(members, joining=joining)
