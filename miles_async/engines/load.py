"""Number and load of the serving engines, which the rollout side's concurrency follows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from miles_async.engines.registry import EngineRegistry, EngineState
from miles_async.errors import EngineError
from miles_async.seams import InferenceServer
from miles_async.types import EngineLoad

LOAD_SECONDS = 2.0  # servers answer at once; a later answer would be out of date


class Loads:
    """Implements ``rollout.concurrency.EngineLoads``."""

    def __init__(self, registry: EngineRegistry, server: InferenceServer) -> None:
        self.registry = registry
        self._server = server

    async def serving(self, other_than: int) -> int:
        await self.registry.wait_until(lambda: self._serving() != other_than)
        return self._serving()

    async def loads(self) -> Mapping[str, EngineLoad]:
        """See ``EngineLoads``. Paused engines are left out: their reports are from before the pause."""
        loads: dict[str, EngineLoad] = {}

        async def ask(engine: str, url: str) -> None:
            with suppress(EngineError):  # the supervisor takes care of engines that do not answer
                loads[engine] = await self._server.load(url, LOAD_SECONDS)

        async with asyncio.TaskGroup() as scope:
            for record in self.registry.in_state(EngineState.SERVING):
                if record.url is not None and not record.paused:
                    scope.create_task(ask(record.engine_id, record.url))
        return loads

    def _serving(self) -> int:
        return len(self.registry.in_state(EngineState.SERVING))
