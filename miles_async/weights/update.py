"""One fleet is brought to staged weights (C8): prepare → pause → flush unless in_place → deliver → digests → continue →
canary → commit.

What rollouts feel is the time from pause to commit (``pause_seconds``); what the transport can prepare
(``prepare_seconds``) happens before it, while engines generate. Engines are continued in a ``finally``.

New requests wait at our side from pause to commit, so none of them meets an unverified engine. The canary
has to run after ``continue``: a paused SGLang answers no generation request. Requests already in flight go on
meanwhile; if the canary fails their engine is fenced and they are generated anew elsewhere.

``--publish-order rolling`` brings engines through these steps a few at a time, and commits when all of them are
through. Requests go on meanwhile, under the version before (``engines/registry.py``).

An engine that fails at any step is fenced; the others go on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import Enum
from functools import partial
from typing import Any

import msgspec
import structlog

from miles_async.arguments.weights import WeightsArguments
from miles_async.errors import PublicationError
from miles_async.runtime.clock import Stopwatch, now
from miles_async.seams import EngineFleet, WeightTransport
from miles_async.types import FleetMembers, HeldWeights, Incarnation, Publication, StagedWeights, TensorShare
from miles_async.weights.verify import EVERYTHING, SHOWN, Comparison, compare_digests, judge_canary

log = structlog.get_logger(__name__)


Admission = AbstractAsyncContextManager[bool]
"""Whether engines may be admitted; they are inside."""


class PublicationState(Enum):
    """Where the publisher is; shown by the watchdog."""

    IDLE = "idle"
    STAGING = "staging"  # while the fleet may be at one of these:
    WAITING_FOR_ENGINES = "waiting for engines"
    PREPARING = "preparing"
    PAUSING = "pausing"
    DELIVERING = "delivering"
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
        """``tolerance``: of the canary.

        ``engines_timeout``: seconds to wait while no engine is up; they may all be restarting.
        """
        self.state = PublicationState.IDLE
        self._fleet = fleet
        self._transport = transport
        self._arguments = arguments
        self._tolerance = tolerance
        self._engines_timeout = engines_timeout
        self._poll_seconds = poll_seconds
        self._told: set[tuple[str, ...]] = set()  # tensors that can't be compared, which somebody was told of
        self.last_loss = ""  # which engine was lost last, and why: for the message when none is left

    async def publish(
        self, version: int, staged: StagedWeights, *, apart: Callable[[], Collection[Incarnation]] = tuple
    ) -> Publication:
        """Bring every engine to ``staged``, as ``version``. Returns when at least one serves it, verified.

        ``apart``: joining engines that are left out, since they are being repaired.

        Raises PublicationError past ``--publication-timeout``, which does not count waiting for engines to come up.
        """
        updates: list[_Update] = []
        try:
            while not any(update.present for update in updates):
                for engines in self._portions(await self._wait_for_engines(apart)):
                    async with self._deadline(version):
                        updates.append(await self._update(staged, engines))
                        await self._admit(staged, updates[-1])
        finally:
            self.state = PublicationState.IDLE
        return _summary(version, staged, updates)

    async def joining(self) -> tuple[Incarnation, ...]:
        """Engines that wait for weights."""
        return (await self._fleet.members()).joining

    async def repair(
        self, staged: StagedWeights, joining: Sequence[Incarnation], admission: Admission
    ) -> tuple[Incarnation, ...]:
        """Bring joining engines to what the others serve. Returns those that hold it, verified; they serve if
        ``admission`` said so, which is entered before. Engines that take too long are fenced.
        """
        if not joining:
            return ()
        try:
            async with asyncio.timeout(self._arguments.publication_timeout):
                update = await self._update(staged, joining)
            async with admission as admitted:
                if admitted:
                    await self._admit(staged, update)
            present = update.present
        except TimeoutError:
            await self._fleet.fence(joining, "repair timed out (--publication-timeout)")
            present = ()
        finally:
            self.state = PublicationState.IDLE
        await self._transport.close()  # of no use to the next delivery, which is to all
        return present

    async def close(self) -> None:
        """End what the transport holds."""
        await self._transport.close()

    def _portions(self, members: FleetMembers) -> Iterator[tuple[Incarnation, ...]]:
        """Which engines are updated together. Those that join stop nobody: first, so that there are more to go on."""
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
        """What is inside may take ``--publication-timeout``."""
        try:
            async with asyncio.timeout(self._arguments.publication_timeout):
                yield
        except TimeoutError as error:
            raise PublicationError(
                f"version {version} was not published within {self._arguments.publication_timeout:g} s "
                f"(--publication-timeout); last state: {self.state.value}; {self.last_loss or 'no engine was lost'}"
            ) from error

    async def _members(self, apart: Callable[[], Collection[Incarnation]]) -> FleetMembers:
        members = await self._fleet.members()
        joining = tuple(engine for engine in members.joining if engine not in apart())
        return msgspec.structs.replace(members, joining=joining)

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

    async def _update(self, staged: StagedWeights, engines: Sequence[Incarnation]) -> _Update:
        """Bring ``staged`` to ``engines`` and verify. Who fails is absent from the result."""
        update, fleet = _Update(self._fleet, engines), self._fleet
        joining = (await fleet.members()).joining
        started = now()
        self.state = PublicationState.PREPARING
        await update.each("probe", fleet.probe)
        await update.each("preparing", partial(self._transport.prepare, staged))
        update.prepare_seconds = now() - started
        started = now()
        try:
            self.state = PublicationState.PAUSING
            mode = self._arguments.pause_generation_mode
            await update.each("pausing", lambda present: fleet.pause(present, mode))
            # In place, requests in flight keep their cache, and SGLang refuses to flush it; who joins has none of ours.
            await update.each("flush_cache", fleet.flush_cache, only=joining if mode == "in_place" else None)
            self.state = PublicationState.DELIVERING
            await update.each("send", partial(self._transport.deliver, staged))
            if self._arguments.compares_digests:
                await self._compare_digests(staged, update, joining)
        finally:
            await update.each("continue", fleet.resume)
        if self._arguments.verify_weights != "off":
            await self._compare_scores(staged, update)
        self.last_loss = update.last_loss or self.last_loss
        update.pause_seconds = now() - started
        update.sent_fraction = self._transport.sent_fraction
        return update

    async def _admit(self, staged: StagedWeights, update: _Update) -> None:
        started = now()
        await update.each("admit", lambda present: self._fleet.admit(present, staged.version))
        self.last_loss = update.last_loss or self.last_loss
        update.pause_seconds += now() - started

    async def _compare_digests(self, staged: StagedWeights, update: _Update, joining: Collection[Incarnation]) -> None:
        """Fence every engine that holds anything else than was staged. While paused: nobody gets a token of it."""
        self.state = PublicationState.VERIFYING
        serving = [engine for engine in update.present if engine not in joining]
        # Who joins has nothing that was compared before.
        for engines, share in ((serving, self._share(staged.version)), (joining, EVERYTHING)):
            held = await update.each("digests", partial(self._fleet.held_weights, share=share), only=engines)
            good: tuple[HeldWeights, Comparison] | None = None
            for engine, weights in held.items():
                if good is not None and weights == good[0]:  # engines that are alike say the same
                    found = good[1]
                else:
                    found = compare_digests(staged, weights, share=share, skip=self._arguments.verify_weights_skip)
                if found.problem:
                    await update.lose(engine, found.problem)
                    continue
                good = weights, found
                update.compared_tensors.append(found.compared)
                update.incomparable_tensors.append(len(found.incomparable))
                self._tell_incomparable(engine, found.incomparable)

    def _share(self, version: int) -> TensorShare:
        if self._arguments.verify_weights == "full":
            return EVERYTHING
        shares = self._arguments.verify_weights_shares
        return TensorShare(version % shares, shares)

    def _tell_incomparable(self, engine: Incarnation, names: tuple[str, ...]) -> None:
        """Once per list: it is the same at every publication."""
        if names and names not in self._told:
            self._told.add(names)
            log.warning(
                "tensors that can't be compared: skipped, or the engine keeps them in another form (quantized, "
                "reordered for a kernel); only the canary says something about them",
                engine=str(engine),
                tensors=len(names),
                first=names[:SHOWN],
            )

    async def _compare_scores(self, staged: StagedWeights, update: _Update) -> None:
        """Fence every engine whose canary disagrees."""
        self.state = PublicationState.VERIFYING
        scores = await update.each("canary", lambda present: self._fleet.score(present, staged.canary_tokens))
        for engine, score in scores.items():
            verdict = judge_canary(staged, score, self._tolerance)
            if verdict.problem:
                await update.lose(engine, verdict.problem)
                continue
            update.canary_difference = max(update.canary_difference, verdict.difference)
            if staged.previous_canary_logprobs and not verdict.tells_versions_apart:
                update.canary_undecided.append(engine)
        if update.canary_undecided and self._arguments.verify_weights == "canary":
            log.warning(
                "the canary could not distinguish this version from the one before: an engine that kept the old "
                "weights would pass, too (--verify-weights full or sample compares all elements)",
                version=staged.version,
                engines=len(update.canary_undecided),
            )


class _Update:
    """One update under way: who fails a step is fenced and not called again; steps are timed."""

    def __init__(self, fleet: EngineFleet, engines: Sequence[Incarnation]) -> None:
        self.present = tuple(engines)
        self.absent: tuple[Incarnation, ...] = ()
        self.last_loss = ""  # who was lost last, and why
        self.steps = Stopwatch()
        self.prepare_seconds = 0.0
        self.pause_seconds = 0.0
        self.canary_difference = 0.0
        self.canary_undecided: list[Incarnation] = []
        self.compared_tensors: list[int] = []  # by each engine that passed
        self.incomparable_tensors: list[int] = []
        self.sent_fraction = 0.0
        self._fleet = fleet

    async def each(
        self,
        step: str,
        call: Callable[[Sequence[Incarnation]], Awaitable[Mapping[Incarnation, Any]]],
        *,
        only: Collection[Incarnation] | None = None,
    ) -> Mapping[Incarnation, Any]:
        """One step for everyone present (of ``only``); results of those that succeed. Who fails is fenced."""
        engines = tuple(engine for engine in self.present if only is None or engine in only)
        if not engines:
            return {}
        with self.steps.timed(step):
            results = await call(engines)
        for engine, error in results.items():
            if isinstance(error, Exception):
                await self.lose(engine, f"{step}: {error}")
        return {engine: result for engine, result in results.items() if not isinstance(result, Exception)}

    async def lose(self, engine: Incarnation, reason: str) -> None:
        """Fence ``engine``."""
        log.warning("engine fenced", engine=str(engine), reason=reason)
        await self._fleet.fence([engine], reason)
        self.present = tuple(e for e in self.present if e != engine)
        self.absent = (*self.absent, engine)
        self.last_loss = f"{engine} was lost: {reason}"


def _summary(version: int, staged: StagedWeights, updates: Sequence[_Update]) -> Publication:
    """Of all portions. Seconds of pausing are those of an engine, on average."""
    present = [len(update.present) for update in updates]
    steps: Counter[str] = Counter()
    for update in updates:
        steps.update(update.steps.seconds)
    return Publication(
        version=version,
        sent_version=staged.version,
        engines=tuple(str(engine) for update in updates for engine in update.present),
        fenced=tuple(str(engine) for update in updates for engine in update.absent),
        prepare_seconds=staged.prepare_seconds + sum(update.prepare_seconds for update in updates),
        pause_seconds=_mean([update.pause_seconds for update in updates], present),
        step_seconds=steps,
        canary_difference=max(update.canary_difference for update in updates),
        canary_undecided=tuple(str(engine) for update in updates for engine in update.canary_undecided),
        compared_tensors=min((count for update in updates for count in update.compared_tensors), default=0),
        incomparable_tensors=max((count for update in updates for count in update.incomparable_tensors), default=0),
        total_bytes=staged.total_bytes,
        sent_fraction=_mean([update.sent_fraction for update in updates], present),
    )


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
