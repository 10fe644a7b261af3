"""Fakes around a ``FakeEngine``: the handle of its server, and a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from miles_async.engines.registry import EngineRegistry
from tests.fakes.fake_engine import FakeEngine


class FakeServer:
    """A ``ServerHandle`` on a FakeEngine: what ``Fleet`` is tested with."""

    def __init__(self, engine: FakeEngine, *, start_error: Exception | None = None) -> None:
        self.engine = engine
        self.stopped = False
        self.host_directory = Path("/nonexistent")
        self._start_error = start_error
        self._exited = asyncio.Event()
        self._why = ""

    async def start(self) -> str:
        if self._start_error is not None:
            raise self._start_error
        await self.engine.__aenter__()
        return self.engine.url

    async def wait_exit(self) -> str:
        await self._exited.wait()
        return self._why

    async def on_host(self, function: Callable[..., object], room: int, *arguments: object) -> object:
        return function(self.host_directory, *arguments)

    async def stop(self) -> None:
        self.stopped = True
        await self.crash("stopped")

    async def crash(self, why: str = "ended with status -9") -> None:
        self._why = why
        await self.engine.die()
        self._exited.set()


class FakeRouter:
    """As ``Router``, without smg: remembers who is registered, and spreads nothing."""

    def __init__(self, registry: EngineRegistry) -> None:
        self._registry = registry
        self.url = ""
        self.registered: list[str] = []
        self.events: list[tuple[str, str]] = []

    async def start(self) -> None:
        self._registry.router_up = True
        self._registry.notify()

    async def supervise(self) -> None:
        await asyncio.Event().wait()

    async def add(self, url: str, timeout: float = 0.0) -> None:
        self.url = self.url or url  # requests go straight to the first engine
        self.registered.append(url)
        self.events.append(("add", url))

    async def remove(self, url: str) -> None:
        if url in self.registered:
            self.registered.remove(url)
        self.events.append(("remove", url))

    async def stop(self) -> None:
        self._registry.router_up = False
