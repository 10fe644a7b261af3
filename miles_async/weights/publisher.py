"""Publication: the trainer's weights are exported and staged while engines generate, then engines are brought to them.

An engine that (re)starts is ``joining``: it takes no requests until a publication, or :meth:`WeightPublisher.repair`
between publications, has brought it to the current version and it is verified. So there is one way for weights to reach
an engine (``update.py``), whichever transport it is (``transports/``).
"""

from __future__ import annotations

import asyncio
from collections import deque

from arguments.weights import WeightsArguments
from miles_async.protocols import TrainerSide
from miles_async.types import Publication, StagedWeights
from miles_async.weights.update import FleetUpdater, PublicationState


class WeightPublisher:
    """One publication or repair at a time."""

    def __init__(
        self,
        trainer: TrainerSide,
        engines: FleetUpdater,
        arguments: WeightsArguments,
        *,
        evaluation: FleetUpdater | None = None,
    ) -> None:
        """``evaluation``: of engines that only evaluate; None: those of training do."""
        self._trainer = trainer
        self._engines = engines
        self._evaluation = evaluation
        self._lock = asyncio.Lock()
        self._staged: deque[StagedWeights] = deque(maxlen=arguments.debug_publication_lag + 1)

    @property
    def state(self) -> PublicationState:
        """Where it is; for the watchdog."""
        return self._engines.state

    @property
    def evaluates_apart(self) -> bool:
        """Whether publications leave evaluations alone."""
        return self._evaluation is not None

    async def publish(self, version: int) -> Publication:
        """Bring every engine to the trainer's weights, named ``version``.

        Returns when at least one engine serves them, verified. Raises PublicationError past
        ``--publication-timeout``, which counts neither a repair under way nor waiting for engines to come up.
        """
        async with self._lock:
            self._engines.state = PublicationState.STAGING
            try:
                async with self._engines.deadline(f"version {version} was not exported"):
                    self._staged.append(await self._trainer.stage_weights(version))
            finally:
                self._engines.state = PublicationState.IDLE
            return await self._engines.publish(version, self._staged[0])

    async def repair(self) -> tuple[str, ...]:
        """Bring joining engines to the version that the others serve. Returns those that now serve."""
        async with self._lock:
            return await self._engines.repair(self._staged[0]) if self._staged else ()

    async def publish_for_evaluation(self) -> None:
        """Bring the engines that only evaluate, if there are any, to the visible version. Raises PublicationError."""
        if self._evaluation is None:
            return
        async with self._lock:
            staged = self._staged[0]
            await self._evaluation.publish(staged.version, staged)

    async def close(self) -> None:
        """End what the transports hold."""
        async with self._lock:
            await self._engines.close()
            if self._evaluation is not None:
                await self._evaluation.close()
