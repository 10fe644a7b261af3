"""Moves engines into and out of the router, together with their state in the registry."""

from __future__ import annotations

import structlog

from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.engines.router import Router
from miles_async.errors import EngineError

log = structlog.get_logger(__name__)


class Routing:
    """Keeps the router's list of workers in step with the registry."""

    def __init__(self, registry: EngineRegistry, router: Router) -> None:
        self._registry = registry
        self._router = router

    async def admit(self, record: EngineRecord, url: str) -> None:
        """Make a joining engine serve. Raises EngineError if the router does not accept it."""
        incarnation = record.incarnation
        await self._router.add(url)
        if record.incarnation == incarnation and record.state is EngineState.JOINING:
            record.state = EngineState.SERVING
            self._registry.notify()
        elif self._registry.answering_at(url) is None:  # lost or drained meanwhile, maybe before the router had it
            await self.remove(url)

    async def fence(self, record: EngineRecord, reason: str) -> None:
        """Take an engine out if it is up. The supervisor then ends its process, with its requests, and restarts it."""
        if record.state in (EngineState.SERVING, EngineState.JOINING):
            await self.take_out(record, reason)

    async def take_out(self, record: EngineRecord, reason: str) -> None:
        """Void everything known about an engine and remove it from the router. No-op if it is out already."""
        if record.state in (EngineState.FENCED, EngineState.DRAINING):
            return
        url = record.url
        record.reason = reason
        record.forget(EngineState.FENCED)
        self._registry.notify()
        log.warning("engine fenced", engine=record.engine_id, reason=reason)
        if url is not None:
            await self.remove(url)

    async def remove(self, url: str) -> None:
        """Remove a server from the router; never raises."""
        try:
            await self._router.remove(url)
        except EngineError as error:  # a router that is down gets the list of serving engines when it is back
            log.warning("router could not remove engine", url=url, error=str(error))
