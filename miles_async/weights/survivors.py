"""Steps that concern each engine by itself: an engine that fails one is left out of the next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from miles_async.types import Incarnation

Answer = TypeVar("Answer")

Step = Callable[[Sequence[Incarnation]], Awaitable[Mapping[Incarnation, Answer | Exception]]]
"""Called with engines; returns the answer or the error of each."""


class Survivors:
    """A set of engines, and which of them have failed."""

    def __init__(self, engines: Sequence[Incarnation]) -> None:
        self.errors: dict[Incarnation, Exception | None] = dict.fromkeys(engines)

    @property
    def left(self) -> tuple[Incarnation, ...]:
        """The engines that have not failed."""
        return tuple(engine for engine, error in self.errors.items() if error is None)

    async def each(
        self, step: Step[Answer], *, only: Collection[Incarnation] | None = None
    ) -> Mapping[Incarnation, Answer]:
        """Run ``step`` for the engines that are left (of ``only``); return the answers of those that succeed."""
        engines = [engine for engine in self.left if only is None or engine in only]
        results = await step(engines) if engines else {}
        answers: dict[Incarnation, Answer] = {}
        for engine, result in results.items():
            if isinstance(result, Exception):
                self.errors[engine] = result
            else:
                answers[engine] = result
        return answers
