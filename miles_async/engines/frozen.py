"""Engines that keep the weights they were started with: a judge, a reward model."""

from __future__ import annotations

from typing import NoReturn

import structlog

from miles_async.engines.registry import EngineRecord, EngineState
from miles_async.engines.stack import EngineStack
from miles_async.errors import EngineError
from miles_async.runtime.tasks import gathered

log = structlog.get_logger(__name__)


class FrozenEngines(EngineStack):
    """A stack with a router of its own, in which every engine that is up serves."""

    async def supervise(self) -> None:
        """Supervise the stack and admit engines as they come up."""
        await gathered(super().supervise(), self._admit())

    async def _admit(self) -> NoReturn:
        while True:
            await self.supervisor.wait_for_joining()
            for record in self.registry.in_state(EngineState.JOINING):
                await self._admit_one(record)

    async def _admit_one(self, record: EngineRecord) -> None:
        assert record.url is not None
        record.verified = True
        try:
            await self.supervisor.routing.admit(record, record.url)
        except EngineError as error:
            await self.supervisor.routing.fence(record, str(error))
