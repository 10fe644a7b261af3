"""Bring one fleet to staged weights (C8): prepare → pause → flush → send → compare → resume → canary → admit.

Engines generate nothing from the pause until they are resumed (``pause_seconds``). What the transport can prepare
(``prepare_seconds``) happens before that, while they generate. Engines are resumed in a ``finally``.

A paused SGLang answers no generation request, so the canary is scored after ``resume``. Meanwhile the engines are on
trial: they generate for requests in flight and for new ones, and every answer waits on the client until its engine is
verified. If the canary fails, the engine is fenced, its answers are discarded, and the requests are repeated elsewhere.

An engine that fails at any step is fenced; the others continue.

``--publish-order all`` updates all engines at once. ``rolling`` updates a few at a time and makes the version visible
when all of them have it; meanwhile requests run under the version before (``engines/registry.py``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import Enum
from typing import TypeVar

import msgspec
import structlog

from miles_async.arguments.weights import WeightsArguments
from miles_async.errors import PublicationError
from miles_async.runtime.clock import now
from miles_async.seams import EngineFleet, InferenceServer, WeightTransport
from miles_async.types import FleetMembers, Incarnation, Publication, StagedWeights
from miles_async.weights.verify import EVERYTHING, Findings, Verification, read_held_weights

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

Admission = AbstractAsyncContextManager[bool]
"""Engines are admitted inside it, if it yields True."""


class PublicationState(Enum):
    """Step of a publication, shown by the watchdog."""

    IDLE = "idle"
    STAGING = "staging"  # while the fleet may be in one of these:
    WAITING_FOR_ENGINES = "waiting for engines"
    PREPARING = "preparing"
    PAUSING = "pausing"
    SENDING = "sending"
    VERIFYING = "verifying"


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
        self.last_loss = ""  # the engine lost last, and why, for the message when none is left
        self.fleet = fleet
        self.transport = transport
        self.arguments = arguments
        self.verification = Verification(arguments, tolerance)
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
        seconds = self.arguments.publication_timeout
        try:
            while not any(update.left for update in updates):
                for engines in self._batches(await self._wait_for_engines(apart)):
                    updates.append(update := EngineUpdate(self, staged, engines))
                    async with asyncio.timeout(seconds):
                        await update.run()
                        await update.admit()
        except TimeoutError as error:
            raise PublicationError(
                f"version {version} was not published within {seconds:g} s (--publication-timeout); last state: "
                f"{self.state.value}; {self.last_loss or 'no engine was lost'}"
            ) from error
        finally:
            self.state = PublicationState.IDLE
        return _summarize(version, staged, updates)

    async def repair(
        self, staged: StagedWeights, joining: Sequence[Incarnation], admission: Admission
    ) -> tuple[Incarnation, ...]:
        """Bring joining engines to the version that the others serve. Returns the engines that hold it, verified.

        They are admitted if ``admission``, entered when they hold it, yields True. Engines that take too long are
        fenced.
        """
        if not joining:
            return ()
        update = EngineUpdate(self, staged, joining)
        late = f"no weights within {self.arguments.publication_timeout:g} s (--publication-timeout)"
        try:
            async with asyncio.timeout(self.arguments.publication_timeout):
                await update.run()
            late = "the router did not accept it in time"
            async with admission as admitted:
                if admitted:
                    await update.admit()
            repaired = update.left
        except TimeoutError:
            members = await self.fleet.members()
            await self.fleet.fence([engine for engine in joining if engine in members.joining], late)
            repaired = tuple(engine for engine in update.left if engine in members.serving)
        finally:
            self.state = PublicationState.IDLE
        await self.close()  # the next delivery is to all engines, so nothing kept can be reused
        return repaired

    async def close(self) -> None:
        """Release what the transport keeps between deliveries.

        Raises PublicationError past ``--publication-timeout``.
        """
        awaited = "engines and sending ranks to release what they keep between deliveries"
        async with publication_deadline(self.arguments.publication_timeout, awaited):
            await self.transport.close()

    def _batches(self, members: FleetMembers) -> Iterator[tuple[Incarnation, ...]]:
        """Engines to update together. Joining engines come first: they interrupt no request, and more engines serve
        afterwards.
        """
        if self.arguments.publish_order == "all":
            yield (*members.serving, *members.joining)
            return
        if members.joining:
            yield members.joining
        at_once = self.arguments.rolling_engines
        for first in range(0, len(members.serving), at_once):
            yield members.serving[first : first + at_once]

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
        members = await self.fleet.members()
        joining = tuple(engine for engine in members.joining if engine not in apart())
        return msgspec.structs.replace(members, joining=joining)


class EngineUpdate:
    """One update of some engines. An engine that fails a step is fenced and left out of the next; steps are timed."""

    def __init__(self, updater: FleetUpdater, staged: StagedWeights, engines: Sequence[Incarnation]) -> None:
        self.left = tuple(engines)  # engines that have not failed
        self.lost: tuple[Incarnation, ...] = ()
        self.step_seconds: dict[str, float] = {}
        self.prepare_seconds = 0.0
        self.pause_seconds = 0.0
        self.sent_fraction = 0.0
        self.findings = Findings()
        self._updater = updater
        self._staged = staged
        self._step_began = now()

    async def run(self) -> None:
        """Bring the staged weights to the engines and verify them."""
        updater, staged = self._updater, self._staged
        fleet, arguments = updater.fleet, updater.arguments
        joining = (await fleet.members()).joining
        started = self._step_began = now()
        updater.state = PublicationState.PREPARING
        await self._settle("probe", await fleet.call(self.left, InferenceServer.probe, brief=True))
        # An external engine outlives its fencing, and would answer requests that it began with wrong weights.
        new = [engine for engine in self.left if engine in joining]
        await self._settle("probe", await fleet.call(new, InferenceServer.abort_all, brief=True))
        await self._settle("preparing", await updater.transport.prepare(staged, self.left) if self.left else {})
        self.prepare_seconds = now() - started
        started = now()
        try:
            updater.state = PublicationState.PAUSING
            mode = arguments.pause_generation_mode
            await self._settle("pausing", await fleet.call(self.left, InferenceServer.pause, mode))
            # In place, requests in flight keep their cache, and SGLang refuses to flush it. Joining engines have none.
            flushed = self.left if mode != "in_place" else [engine for engine in self.left if engine in joining]
            await self._settle("flush", await fleet.call(flushed, InferenceServer.flush_cache))
            updater.state = PublicationState.SENDING
            await self._settle("send", await updater.transport.deliver(staged, self.left) if self.left else {})
            if arguments.compares_digests:
                updater.state = PublicationState.VERIFYING
                await self._compare(joining)
        finally:
            await self._settle("resume", await fleet.call(self.left, InferenceServer.resume))
        await fleet.begin_trial(self.left, staged.version)
        self.pause_seconds = now() - started
        updater.state = PublicationState.VERIFYING
        scored = self.left if arguments.verify_weights != "off" else ()
        scores = await self._settle("canary", await fleet.call(scored, InferenceServer.score, staged.canary_tokens))
        await self._lose(updater.verification.judge_scores(staged, scores, self.findings))
        self.sent_fraction = updater.transport.sent_fraction

    async def admit(self) -> None:
        """Route requests to the engines under the version."""
        self._step_began = now()
        await self._settle("admit", await self._updater.fleet.admit(self.left, self._staged.version))

    async def _compare(self, joining: Collection[Incarnation]) -> None:
        """Fence every engine whose weights differ from the staged ones, while none of them generates."""
        fleet, verification = self._updater.fleet, self._updater.verification
        serving = [engine for engine in self.left if engine not in joining]
        new = [engine for engine in self.left if engine in joining]  # nothing in them has been compared before
        for engines, share in ((serving, verification.share(self._staged.version)), (new, EVERYTHING)):
            held = await self._settle("compare", await read_held_weights(fleet, engines, share))
            await self._lose(await verification.compare_digests(self._staged, held, share, self.findings))

    async def _settle(
        self, step: str, results: Mapping[Incarnation, Result | Exception]
    ) -> Mapping[Incarnation, Result]:
        """Record how long a step took and fence the engines that failed it. Returns the answers of the others."""
        self.step_seconds[step] = self.step_seconds.get(step, 0.0) + now() - self._step_began
        await self._lose(
            {engine: f"{step}: {found}" for engine, found in results.items() if isinstance(found, Exception)}
        )
        self._step_began = now()
        return {engine: found for engine, found in results.items() if not isinstance(found, Exception)}

    async def _lose(self, problems: Mapping[Incarnation, str]) -> None:
        self.left = tuple(engine for engine in self.left if engine not in problems)
        for engine, problem in problems.items():
            log.warning("engine fenced", engine=str(engine), reason=problem)
            self.lost = (*self.lost, engine)
            self._updater.last_loss = f"{engine} was lost: {problem}"
            await self._updater.fleet.fence([engine], problem)


@asynccontextmanager
async def publication_deadline(seconds: float, awaited: str) -> AsyncIterator[None]:
    """Allow ``seconds``, of ``--publication-timeout``, for the block. Raises PublicationError with ``awaited``."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise PublicationError(f"the publisher waited {seconds:g} s for {awaited} (--publication-timeout)") from error


def _summarize(version: int, staged: StagedWeights, updates: Sequence[EngineUpdate]) -> Publication:
    """Summarize all updates as one publication. Pause seconds are the mean over engines."""
    engines = [len(update.left) for update in updates]
    findings = [update.findings for update in updates]
    steps: Counter[str] = Counter()
    for update in updates:
        steps.update(update.step_seconds)
    return Publication(
        version=version,
        sent_version=staged.version,
        engines=tuple(str(engine) for update in updates for engine in update.left),
        fenced=tuple(str(engine) for update in updates for engine in update.lost),
        copy_seconds=staged.copy_seconds,
        prepare_seconds=staged.prepare_seconds + sum(update.prepare_seconds for update in updates),
        pause_seconds=_mean([update.pause_seconds for update in updates], engines),
        step_seconds=steps,
        canary_difference=max(each.canary_difference for each in findings),
        canary_undecided=tuple(str(engine) for each in findings for engine in each.canary_undecided),
        compared_tensors=min((count for each in findings for count in each.compared_tensors), default=0),
        incomparable_tensors=max((count for each in findings for count in each.incomparable_tensors), default=0),
        total_bytes=staged.total_bytes,
        sent_fraction=_mean([update.sent_fraction for update in updates], engines),
    )


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
