"""Router, engines and client put together for the rollout manager.

>>> group = EngineGroup(engines=2, launch=RayServers(SGLANG, spec))
>>> options = {"log_dir": logs, "network": Network(), "calls": SGLANG.calls}
>>> stack = EngineStack([group], engines_arguments, weights_arguments, **options)
>>> await stack.start()  # engines are joining: publish weights to them, through stack.fleet
>>> await stack.client.generate(request)  # while stack.supervise() runs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from miles_async.arguments.engines import EnginesArguments
from miles_async.arguments.routing import RouterShape
from miles_async.arguments.weights import WeightsArguments
from miles_async.engines.client import RouterClient
from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.load import Loads
from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
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


class EngineStack:
    """The parts around one registry, on one event loop."""

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
    ) -> None:
        """Nothing runs and no socket is open before :meth:`start`.

        ``calls``: makes the calls that the engines understand. ``name``: name of the router and its log. ``port``: the
        router's, None for a free one. ``keys``: of engines and router, None on loopback only. ``routers``: of the
        model's mixtures, if answers tell the experts that they chose. ``vocabulary``: number of the model's token ids;
        None: not known.
        """
        self.http = Http(keys, network.tls)
        self.registry = EngineRegistry()
        self.traffic = Traffic()
        self.server = server = calls(self.http)
        self.loads = Loads(self.registry, server)
        self.router = Router(
            self.registry,
            self.http,
            name=name,
            log_dir=log_dir,
            policy=arguments.sglang_router_policy,
            network=network,
            port=port,
            extra=arguments.router_extra,
            keys=keys,
        )
        self.supervisor = EngineSupervisor(
            self.registry,
            self.router,
            server,
            groups,
            max_restarts=arguments.engine_max_restarts,
            restart_window=arguments.engine_restart_window,
        )
        self._router_metrics = RouterMetrics(self.http, lambda: self.router.metrics_url)
        self.fleet = Fleet(
            self.registry,
            self.supervisor,
            server,
            self.traffic,
            step_timeout=weights.step_timeout,
        )
        self.client = RouterClient(
            server,
            self.http,
            self.registry,
            self.traffic,
            router_url=lambda: self.router.url,
            routers=routers,
            vocabulary=vocabulary,
            keep_aborted=weights.keep_aborted,
            request_timeout=arguments.request_timeout,
            retries=arguments.request_retries,
            # The longest legitimate wait: every engine restarts, then weights are published to it.
            gate_timeout=arguments.engine_start_timeout + weights.publication_timeout + 60,
        )

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
        """Cheap, for logs and messages."""
        return engine_stats(self.registry, self.traffic, self._router_metrics.latest)


class FrozenEngines(EngineStack):
    """Engines that keep the weights they were started with, such as a judge: each serves as soon as it is up."""

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


def engine_stats(registry: EngineRegistry, traffic: Traffic, router: Mapping[str, float]) -> EngineStats:
    return EngineStats(
        in_flight=traffic.in_flight,
        oldest_request_seconds=traffic.oldest_seconds(),
        busy_seconds=traffic.busy_seconds(),
        answers=dict(traffic.completed),
        failed_tries=traffic.failed,
        engines=registry.describe(),
        router=dict(router),
        restarts={record.engine_id: record.restarts for record in registry.engines.values()},
    )
