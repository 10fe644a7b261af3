"""Log-probs of given tokens by the engines of a stack, without generation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count

from miles_async.engines.registry import EngineRegistry
from miles_async.errors import (
    EngineError,
    EngineTimeoutError,
    OverdueError,
    RequestRejectedError,
    ServiceUnavailableError,
)
from miles_async.seams import InferenceServer
from miles_async.types import Float32


class EngineScorer:
    """Asks the engines round-robin. Callers retry failures (``services.Circuit``)."""

    def __init__(self, server: InferenceServer, registry: EngineRegistry, *, timeout: float, at_once: int) -> None:
        """``timeout``: seconds for one answer, once the request has its turn. ``at_once``: requests at all engines."""
        self._server = server
        self._registry = registry
        self._timeout = timeout
        self._turns = asyncio.Semaphore(at_once)
        self._numbers = count()

    async def __call__(self, tokens: Sequence[int], first: int) -> Float32:
        """Log-probs of tokens[first:], each given the tokens before it, at temperature 1; ``first`` is at least 1.

        Raises:
            RequestRejectedError: an engine cannot score these tokens: they are too many, or not of its vocabulary.
            OverdueError: no answer in time.
            ServiceUnavailableError: no engine is up, or the one that was asked failed.
        """
        async with self._turns:
            if not self._registry.may_dispatch():
                raise ServiceUnavailableError(f"no engine is up: {self._registry.describe()}")
            url = self._registry.pick_serving(next(self._numbers))
            try:
                score = await self._server.score(url, tokens, self._timeout, first=first)
            except RequestRejectedError:
                raise
            except EngineTimeoutError as error:
                raise OverdueError(str(error)) from error
            except EngineError as error:
                raise ServiceUnavailableError(str(error)) from error
        return score.logprobs
