"""Simulated servers and router under the real fleet, registry and client."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from miles_async.engines.client import ROUTING_KEY
from miles_async.engines.http import Http
from miles_async.engines.kind import Arguments, Result, ServerHandle
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.router import Router
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.stack import EngineParts
from miles_async.engines.supervisor import EngineGroup
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineStartError
from miles_async.simulation.engine import Meter, SimulatedEngine
from miles_async.simulation.network import Host, Network, Response, SimulatedHttp
from miles_async.simulation.recording import EventLog
from miles_async.simulation.settings import CallFault, FaultAction, SimulationSettings

ROUTER_URL = "sim://router"


class SimulatedEngines(EngineParts):
    """Implements the manager's ``Engines``. Create it on the loop that it runs on."""

    def __init__(self, settings: SimulationSettings, log: EventLog) -> None:
        self.network = Network()
        self.meter = Meter()
        self._settings = settings
        self._log = log
        self._latencies = random.Random(f"{settings.seed} responses")
        self._crashes = random.Random(f"{settings.seed} crashes")
        self._pending_crashes = list(settings.faults.crashes)
        self._calls: Counter[tuple[int, str]] = Counter()
        group = EngineGroup(engines=settings.num_engines, streams=True, launch=self._launch)
        http, registry = self._session(), EngineRegistry()
        super().__init__(
            [group],
            settings.engines,
            settings.weights,
            http=http,
            server=SGLangServer(http),
            registry=registry,
            router=self._make_router(registry),
            traffic=Traffic(asyncio.get_running_loop().time),
        )

    def _session(self) -> Http:
        return SimulatedHttp(self.network)

    def _make_router(self, registry: EngineRegistry) -> Router:
        chance = random.Random(f"{self._settings.seed} router")
        router = SimulatedRouter(registry, self.network, self._settings.engines.sglang_router_policy, chance)
        return cast(Router, router)

    async def start(self) -> None:
        await self.router.start()
        await self.supervisor.start()

    async def supervise(self) -> None:
        await self.supervisor.supervise()

    async def wait_for_joining(self) -> None:
        await self.supervisor.wait_for_joining()

    async def scale(self, group: str, engines: int) -> None:
        await self.supervisor.scale(group, engines)

    async def stop(self) -> None:
        await self.supervisor.stop()

    def _launch(self, engine_index: int, incarnation: int) -> ServerHandle:
        return SimulatedServer(self, engine_index, incarnation)

    # What one server asks of the whole.
    def new_engine(self, index: int, incarnation: int) -> SimulatedEngine:
        """The server of engine ``index``, listening."""
        url = f"sim://engine-{index}.{incarnation}"
        engine = SimulatedEngine(
            index,
            url,
            self._settings,
            chance=self._latencies,
            meter=self.meter,
            log=self._log,
            fault=lambda path: self._fault(index, path),
        )
        self.network.hosts[url] = engine
        self._log.add("engine-up", engine=engine.name, incarnation=incarnation)
        return engine

    def start_seconds(self, index: int, incarnation: int) -> float:
        """Seconds until it is up. Raises EngineStartError if it fails to start."""
        if incarnation and self._settings.faults.never_restart:
            raise EngineStartError(f"engine-{index} does not come up (simulated)")
        return self._settings.start_seconds

    def crash_seconds(self, index: int) -> list[float]:
        """Seconds from now at which this engine dies unless it did before."""
        now = asyncio.get_running_loop().time()
        due = [crash for crash in self._pending_crashes if crash.engine == index and crash.at_seconds >= now]
        delays = [crash.at_seconds - now for crash in due]
        if (mean := self._settings.faults.mean_seconds_between_crashes) is not None:
            delays.append(self._crashes.expovariate(1 / mean))
        return delays

    def _fault(self, index: int, path: str) -> FaultAction | None:
        faults: tuple[CallFault, ...] = self._settings.faults.calls
        if not faults:
            return None
        self._calls[index, path] += 1
        call = self._calls[index, path]
        return next((f.action for f in faults if (f.engine, f.path, f.call) == (index, path, call)), None)


class SimulatedServer:
    """A ``ServerHandle``."""

    def __init__(self, engines: SimulatedEngines, index: int, incarnation: int) -> None:
        self._engines = engines
        self._index = index
        self._incarnation = incarnation
        self._engine: SimulatedEngine | None = None
        self._crashes: list[asyncio.TimerHandle] = []

    async def start(self) -> str:
        await asyncio.sleep(self._engines.start_seconds(self._index, self._incarnation))
        engine = self._engine = self._engines.new_engine(self._index, self._incarnation)
        loop = asyncio.get_running_loop()
        delays = self._engines.crash_seconds(self._index)
        self._crashes = [loop.call_later(delay, self._end, "crashed") for delay in delays]
        return engine.url

    async def wait_exit(self) -> str:
        assert self._engine is not None
        return await self._engine.wait_exit()

    async def on_host(
        self, function: Callable[[Path, *Arguments], Result], room: int, *arguments: *Arguments
    ) -> Result:
        return function(Path("/nonexistent"), *arguments)

    async def stop(self) -> None:
        self._end("stopped")

    def _end(self, why: str) -> None:
        for crash in self._crashes:
            crash.cancel()
        if self._engine is not None:
            self._engines.network.hosts.pop(self._engine.url, None)
            self._engine.die(why)


class SimulatedRouter:
    """Has the methods of ``engines.router.Router`` that the fleet uses, and is the host that spreads requests.

    ``consistent_hashing`` goes by the key, ``power_of_two`` takes the less loaded of two engines drawn at random; any
    other policy is taken as least loaded.
    """

    url = ROUTER_URL

    def __init__(self, registry: EngineRegistry, network: Network, policy: str, chance: random.Random) -> None:
        self._registry = registry
        self._network = network
        self._policy = policy
        self._chance = chance
        self._urls: list[str] = []

    async def start(self) -> None:
        self._network.hosts[ROUTER_URL] = cast(Host, self)
        self._registry.router_up = True
        self._registry.notify()

    async def supervise(self) -> None:
        await asyncio.Event().wait()

    async def add(self, url: str, timeout: float = 30.0) -> None:
        if url not in self._urls:
            self._urls.append(url)

    async def remove(self, url: str) -> None:
        if url in self._urls:
            self._urls.remove(url)

    async def answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        if not self._urls:
            return Response(b"no worker is available", status=503)
        host, _ = self._network.host(self._choose(headers.get(ROUTING_KEY, "")) + path)
        return await host.answer(path, body, headers)

    def _choose(self, key: str) -> str:
        match self._policy:
            case "consistent_hashing":
                return self._urls[zlib.crc32(key.encode()) % len(self._urls)]
            case "power_of_two":
                urls = self._chance.sample(self._urls, min(2, len(self._urls)))
            case _:
                urls = self._urls
        hosts = self._network.hosts
        return min(
            (url for url in urls if url in hosts),
            key=lambda url: cast(SimulatedEngine, hosts[url]).load,
            default=urls[0],
        )
