"""Boundaries of the loop besides the two sides: publication, checkpoints, live settings, shared GPUs, records.

``controller.py`` is their consumer; ``wiring/`` chooses what stands behind them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from miles_async.types import Changes, Publication


class Publisher(Protocol):
    """weights.publisher.WeightPublisher, as seen from here."""

    async def copy(self, version: int) -> None: ...

    async def stage(self, version: int) -> None: ...

    async def deliver(self, version: int) -> Publication: ...

    async def repair(self) -> tuple[str, ...]: ...

    def evaluating(self) -> AbstractAsyncContextManager[None]: ...

    @property
    def evaluates_apart(self) -> bool: ...

    async def close(self) -> None: ...


class Checkpoints(Protocol):
    """Atomic checkpoints of both sides and of the loop's own position."""

    async def save(self, position: Position) -> None:
        """Snapshot the current state; return once training may resume."""
        ...

    async def finish(self) -> Mapping[str, float]:
        """Wait for the last save; return its metrics, or none if it had finished already."""
        ...

    async def load(self) -> Position | None:
        """Restore both sides and return the position to continue from; None to start fresh."""
        ...


class LiveSettings(Protocol):
    """Receives requests of ``miles-async set`` and hands them over at the boundaries of steps."""

    def begin(self, step: int) -> None:
        """Note that the loop continues after ``step`` trained steps."""
        ...

    def take(self, step: int, *, last: bool) -> Changes | None:
        """Take the changes requested since the last call; they take effect after ``step``. ``last``: nothing
        follows that step, so later requests are refused.
        """
        ...


class NoChanges:
    """A LiveSettings that receives no requests."""

    def begin(self, step: int) -> None: ...

    def take(self, step: int, *, last: bool) -> Changes | None:
        return None


class Gpus(Protocol):
    """Turns of trainer and engines on GPUs that they share."""

    async def for_training(self, evaluation: Awaitable[None] | None) -> None:
        """Wait until the trainer has its memory. Engines have no weights from then on, and only ``evaluation`` may
        still use them.
        """
        ...

    def training_is_over(self) -> None:
        """Note that the trainer is idle until the next :meth:`for_training`."""
        ...

    async def for_generating(self) -> None:
        """Wait for :meth:`training_is_over`, and until the engines have their memory and can receive weights."""
        ...


class NoTurns:
    """A Gpus for sides that share nothing."""

    async def for_training(self, evaluation: Awaitable[None] | None) -> None: ...

    def training_is_over(self) -> None: ...

    async def for_generating(self) -> None: ...


NO_TURNS = NoTurns()
NO_CHANGES = NoChanges()


class Recorder(Protocol):
    """Receives metrics, publications and evaluations: progress, files, trackers.

    ``step``: rollout steps that are trained, with the one that is recorded.
    """

    def step(self, step: int, metrics: Mapping[str, float], ages: Mapping[int, int]) -> None: ...

    def publication(self, record: Publication) -> None: ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def checkpoint(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Position of the loop: ``step`` rollout steps are trained, the trainer holds ``version``."""

    step: int = 0
    version: int = 0
    unpublished: int = 0  # steps trained since ``version`` was published

    def resumed(self) -> Position:
        """Position from which a run saved here resumes. A version names one set of weights forever, so weights that
        were trained and never published get a new one.
        """
        return Position(step=self.step, version=self.version + (self.unpublished > 0))
