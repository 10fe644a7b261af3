"""Steps that concern each engine by itself: who fails one is left out of the next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from miles_async.types import Incarnation


class Attempt:
    """Some engines, and how each of them got on."""

    def __init__(self, engines: Sequence[Incarnation]) -> None:
        self.errors: dict[Incarnation, Exception | None] = dict.fromkeys(engines)

    @property
    def left(self) -> tuple[Incarnation, ...]:
        """Who has not failed."""
        return tuple(engine for engine, error in self.errors.items() if error is None)

    async def each(
        self,
        call: Callable[[Sequence[Incarnation]], Awaitable[Mapping[Incarnation, Any | Exception]]],
        engines: Sequence[Incarnation] | None = None,
    ) -> Mapping[Incarnation, Any]:
        """``call`` on those left (of ``engines``); results of those that succeed."""
        chosen = [engine for engine in self.left if engines is None or engine in engines]
        results = await call(chosen) if chosen else {}
        self.errors |= {engine: result for engine, result in results.items() if isinstance(result, Exception)}
        return {engine: result for engine, result in results.items() if not isinstance(result, Exception)}
