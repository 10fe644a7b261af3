"""One update of some engines: probe → prepare → pause → flush unless in_place → send → digests → continue → canary.

Rollouts stand still from the pause until the engines are admitted (``pause_seconds``). What the transport can prepare
(``prepare_seconds``) happens before that, while engines generate. Engines are continued in a ``finally``.

New requests wait on the client from pause to admission, so none of them meets an unverified engine. The canary has to
run after ``continue``: a paused SGLang answers no generation request. Requests already in flight go on meanwhile; if
the canary fails, their engine is fenced and they are generated again elsewhere.

An engine that fails at any step is fenced; the others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import TypeVar

import structlog

from miles_async.arguments.weights import WeightsArguments
from miles_async.errors import EngineError
from miles_async.runtime.clock import Stopwatch, now
from miles_async.seams import EngineFleet, WeightTransport
from miles_async.types import Incarnation, Publication, StagedWeights
from miles_async.weights.survivors import Step, Survivors
from miles_async.weights.verification import Findings, Verification
from miles_async.weights.verify import EVERYTHING

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")


class PublicationState(Enum):
    """Step of a publication, shown by the watchdog."""

    IDLE = "idle"
    STAGING = "staging"  # while the fleet may be in one of these:
    WAITING_FOR_ENGINES = "waiting for engines"
    PREPARING = "preparing"
    PAUSING = "pausing"
    DELIVERING = "delivering"
    VERIFYING = "verifying"


class EngineUpdate:
    """One update under way. Engines that fail a step are fenced and left out of the next; steps are timed."""

    def __init__(
        self,
        fleet: EngineFleet,
        transport: WeightTransport,
        arguments: WeightsArguments,
        verification: Verification,
        engines: Sequence[Incarnation],
        enter: Callable[[PublicationState], None],
    ) -> None:
        """``enter`` is told every state as it begins."""
        self.lost: tuple[Incarnation, ...] = ()
        self.last_loss = ""  # which engine was lost last, and why
        self.steps = Stopwatch()
        self.prepare_seconds = 0.0
        self.pause_seconds = 0.0
        self.sent_fraction = 0.0
        self.findings = Findings()
        self._survivors = Survivors(engines)
        self._fleet = fleet
        self._transport = transport
        self._arguments = arguments
        self._verification = verification
        self._enter = enter

    @property
    def left(self) -> tuple[Incarnation, ...]:
        """The engines that were not lost."""
        return self._survivors.left

    async def run(self, staged: StagedWeights) -> None:
        """Bring ``staged`` to the engines and verify them."""
        fleet, mode = self._fleet, self._arguments.pause_generation_mode
        joining = (await fleet.members()).joining
        started = now()
        self._enter(PublicationState.PREPARING)
        await self._each("probe", fleet.probe)
        await self._each("preparing", partial(self._transport.prepare, staged))
        self.prepare_seconds = now() - started
        started = now()
        try:
            self._enter(PublicationState.PAUSING)
            await self._each("pausing", lambda engines: fleet.pause(engines, mode))
            # In place, requests in flight keep their cache, and SGLang refuses to flush it. Engines that join have none
            # of our requests.
            await self._each("flush_cache", fleet.flush_cache, only=joining if mode == "in_place" else None)
            self._enter(PublicationState.DELIVERING)
            await self._each("send", partial(self._transport.deliver, staged))
            if self._arguments.compares_digests:
                self._enter(PublicationState.VERIFYING)
                await self._compare_digests(staged, joining)
        finally:
            await self._each("continue", fleet.resume)
        if self._arguments.verify_weights != "off":
            self._enter(PublicationState.VERIFYING)
            await self._compare_scores(staged)
        self.pause_seconds = now() - started
        self.sent_fraction = self._transport.sent_fraction

    async def admit(self, version: int) -> None:
        """Route requests to the engines under ``version``."""
        started = now()
        await self._each("admit", lambda engines: self._fleet.admit(engines, version))
        self.pause_seconds += now() - started

    async def _compare_digests(self, staged: StagedWeights, joining: Collection[Incarnation]) -> None:
        """Fence every engine that holds anything else than was staged, while none of them generates."""
        serving = [engine for engine in self.left if engine not in joining]
        # Nothing of an engine that joins has been compared before.
        for engines, share in ((serving, self._verification.share(staged.version)), (joining, EVERYTHING)):
            held = await self._each("digests", partial(self._fleet.held_weights, share=share), only=engines)
            await self._lose(await self._verification.compare_digests(staged, held, share, self.findings))

    async def _compare_scores(self, staged: StagedWeights) -> None:
        """Fence every engine whose canary disagrees."""
        scores = await self._each("canary", lambda engines: self._fleet.score(engines, staged.canary_tokens))
        await self._lose(self._verification.judge_scores(staged, scores, self.findings))

    async def _each(
        self, name: str, step: Step[Answer], *, only: Collection[Incarnation] | None = None
    ) -> Mapping[Incarnation, Answer]:
        """Run one step for the engines that are left (of ``only``), and fence those that fail it."""
        engines = [engine for engine in self.left if only is None or engine in only]
        if not engines:
            return {}
        with self.steps.timed(name):
            answers = await self._survivors.each(step, only=engines)
        errors = self._survivors.errors
        await self._lose({engine: f"{name}: {errors[engine]}" for engine in engines if errors[engine] is not None})
        return answers

    async def _lose(self, problems: Mapping[Incarnation, str]) -> None:
        """Fence these engines with their errors as reasons."""
        for engine, problem in problems.items():
            log.warning("engine fenced", engine=str(engine), reason=problem)
            self._survivors.errors[engine] = EngineError(problem)
            self.lost = (*self.lost, engine)
            self.last_loss = f"{engine} was lost: {problem}"
            await self._fleet.fence([engine], problem)


def summarize(version: int, staged: StagedWeights, updates: Sequence[EngineUpdate]) -> Publication:
    """The updates of all portions as one publication. Seconds of pausing are the mean over engines."""
    engines = [len(update.left) for update in updates]
    findings = [update.findings for update in updates]
    steps: Counter[str] = Counter()
    for update in updates:
        steps.update(update.steps.seconds)
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
