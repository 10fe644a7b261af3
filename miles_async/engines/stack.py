"""Router, engines and client put together for the rollout manager.

>>> group = EngineGroup(engines=2, launch=RayServers(SGLANG, spec))
>>> options = {"log_dir": logs, "network": Network(), "calls": SGLANG.calls}
>>> stack = EngineStack([group], engines_arguments, weights_arguments, **options)
>>> await stack.start()  # engines are joining: publish weights to them, through stack.fleet
>>> await stack.client.generate(request)  # while stack.supervise() runs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from miles_async.arguments.engines import EnginesArguments
from miles_async.arguments.routing import RouterShape
from miles_async.arguments.weights import WeightsArguments
from miles_async.engines.client import RouterClient
from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.load import Loads
from miles_async.engines.registry import EngineRegistry, EngineState
from miles_async.engines.router import Router
from miles_async.engines.router_metrics import RouterMetrics
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineError
from miles_async.runtime.network.addresses import Network
from miles_async.runtime.network.keys import EngineKeys
from miles_async.runtime.tasks import afterwards, gathered, quietly
from miles_async.seams import InferenceServer
from miles_async.types import EngineStats


class EngineParts:
    """The parts around one registry, on one event loop: the same for a run and its simulation."""

    def __init__(
        self,
        groups: Sequence[EngineGroup],
        arguments: EnginesArguments,
        weights: WeightsArguments,
        *,
        http: Http,
        server: InferenceServer,
        registry: EngineRegistry,
        router: Router,
        traffic: Traffic,
        routers: RouterShape | None = None,
        vocabulary: int | None = None,
        needed: bool = True,
    ) -> None:
        """``server``: the calls that the engines understand. ``routers``, ``vocabulary``: see :class:`RouterClient`.
        ``needed``: see :class:`EngineSupervisor`.
        """
        self.http = http
        self.registry = registry
        self.traffic = traffic
        self.server = server
        self.loads = Loads(registry, server)
        self.router = router
        self.supervisor = EngineSupervisor(
            registry,
            router,
            server,
            groups,
            max_restarts=arguments.engine_max_restarts,
            restart_window=arguments.engine_restart_window,
            needed=needed,
        )
        self.fleet = Fleet(registry, self.supervisor, server, traffic, step_timeout=weights.step_timeout)
        self.client = RouterClient(
            server,
            http,
            registry,
            traffic,
            router_url=lambda: self.router.url,
            routers=routers,
            vocabulary=vocabulary,
            keep_aborted=weights.keep_aborted,
            request_timeout=arguments.request_timeout,
            retries=arguments.request_retries,
            # The longest legitimate wait: every engine restarts, then weights are published to it.
            gate_timeout=arguments.engine_start_timeout + weights.publication_timeout + 60,
        )

    def stats(self) -> EngineStats:
        """Cheap, for logs and messages."""
        return EngineStats(
            in_flight=self.traffic.in_flight,
            oldest_request_seconds=self.traffic.oldest_seconds(),
            busy_seconds=self.traffic.busy_seconds(),
            failed_tries=self.traffic.failed,
            engines=self.registry.describe(),
            router={},
            restarts={record.engine_id: record.restarts for record in self.registry.engines.values()},
        )


class EngineStack(EngineParts):
    """The parts of a run."""

    def __init__(
        self,
        groups: Sequence[EngineGroup],
        arguments: EnginesArguments,
        weights: WeightsArguments,
        *,
        log_dir: Path,
        network: Network,
        calls: Callable[[Http], InferenceServer],
        name: str = "router",
        port: int | None = None,
        keys: EngineKeys | None = None,
        routers: RouterShape | None = None,
        vocabulary: int | None = None,
        needed: bool = True,
    ) -> None:
        """Nothing runs and no socket is open before :meth:`start`.

        ``name``: name of the router and its log. ``port``: the router's, None for a free one. ``keys``: of engines and
        router, None on loopback only.
        """
        http, registry = Http(keys, network.tls), EngineRegistry()
        router = Router(
            registry,
            http,
            name=name,
            log_dir=log_dir,
            policy=arguments.sglang_router_policy,
            network=network,
            port=port,
            extra=arguments.router_extra,
            keys=keys,
        )
        super().__init__(
            groups,
            arguments,
            weights,
            http=http,
            server=calls(http),
            registry=registry,
            router=router,
            traffic=Traffic(),
            routers=routers,
            vocabulary=vocabulary,
            needed=needed,
        )
        self._router_metrics = RouterMetrics(http, lambda: self.router.metrics_url)

    async def start(self) -> None:
        """Start all processes; engines are ``joining`` then. Raises EngineStartError, having stopped everything."""
        try:
            await gathered(self.router.start(), self.supervisor.start())
        except BaseException:
            await quietly(self.stop())
            raise

    async def supervise(self) -> None:
        """Keep all processes alive until cancelled; see ``EngineSupervisor.supervise``."""
        await gathered(self.supervisor.supervise(), self._router_metrics.run())

    async def stop(self) -> None:
        """End all processes. Cancel :meth:`supervise` first, which would restart them."""
        async with afterwards(self.http.close), afterwards(self.router.stop):
            await self.supervisor.stop()

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(super().stats(), router=dict(self._router_metrics.latest))


class FrozenEngines(EngineStack):
    """Engines that keep the weights they were started with, such as a judge: each serves as soon as it is up."""

    async def supervise(self) -> None:
        """Supervise the stack and admit engines as they come up."""
        await gathered(super().supervise(), self._admit())

    async def _admit(self) -> NoReturn:
        while True:
            await self.supervisor.wait_for_joining()
            record = self.registry.in_state(EngineState.JOINING)[0]
            incarnation, record.verified = record.incarnation, True
            try:
                await self.supervisor.routing.admit(record)
            except EngineError as error:
                if record.incarnation == incarnation:
                    await self.supervisor.routing.fence(record, str(error))
