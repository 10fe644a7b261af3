"""Router, engines and client put together: what the rollout manager is given.

>>> stack = EngineStack(spec, arguments, num_engines=2, launch=RayServers(spec), parse_versions=parse)
>>> await stack.start()  # engines are joining: publish weights to them, through stack.fleet
>>> await stack.client.generate(...)  # beside a running stack.fleet.supervise()
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from arguments.engines import EnginesArguments
from miles_async.engines.addresses import node_host
from miles_async.engines.client import ParseVersions, RouterClient
from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.load import Loads
from miles_async.engines.placement import LaunchServer
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.router import Router
from miles_async.engines.server import ServerSpec
from miles_async.engines.traffic import Traffic
from miles_async.errors import first_error


class EngineStack:
    """The parts, sharing one registry and one HTTP session. All of it belongs on one event loop."""

    def __init__(
        self,
        spec: ServerSpec,
        arguments: EnginesArguments,
        *,
        num_engines: int,
        launch: LaunchServer,
        parse_versions: ParseVersions,
        publication_timeout: float = 300.0,
    ) -> None:
        """Nothing runs and no socket is open before :meth:`start`."""
        self.http = Http()
        self.registry = EngineRegistry()
        self.traffic = Traffic()
        self.loads = Loads(self.registry, self.http)
        self.router = Router(
            self.registry,
            self.http,
            log_dir=Path(spec.log_dir),
            policy=arguments.sglang_router_policy,
            host=node_host(single_node=spec.single_node),
            port=arguments.sglang_router_port,
            extra=arguments.router_extra,
        )
        self.fleet = Fleet(
            self.registry,
            self.router,
            self.http,
            self.traffic,
            launch,
            num_engines=num_engines,
            ranks_per_engine=spec.tensor_parallel_size,
            max_restarts=arguments.engine_max_restarts,
            bucket_timeout=publication_timeout / 4,  # so that one engine that hangs leaves time for the others
        )
        self.client = RouterClient(
            self.http,
            self.registry,
            self.traffic,
            router_url=lambda: self.router.url,
            parse_versions=parse_versions,
            request_timeout=arguments.request_timeout,
            retries=arguments.request_retries,
            # The longest legitimate wait: every engine restarts, then weights are published to it.
            gate_timeout=arguments.engine_start_timeout + publication_timeout + 60,
        )

    async def start(self) -> None:
        """Router and engines up; engines ``joining``. Raises EngineStartError, having stopped everything."""
        try:
            async with asyncio.TaskGroup() as scope:
                scope.create_task(self.router.start())
                scope.create_task(self.fleet.start())
        except BaseExceptionGroup as group:
            await self.stop()
            raise first_error(group) from None
        except BaseException:
            await self.stop()
            raise

    async def supervise(self) -> None:
        """Keeps router and engines alive until cancelled; see ``Fleet.supervise``."""
        await self.fleet.supervise()

    async def wait_for_joining(self) -> None:
        """Until at least one engine waits for weights."""
        await self.fleet.wait_for_joining()

    async def stop(self) -> None:
        """End all processes. Cancel ``fleet.supervise`` first, or it restarts them."""
        await self.fleet.stop()
        await self.router.stop()
        await self.http.close()

    def stats(self) -> dict[str, Any]:
        """Cheap, for logs and messages."""
        return engine_stats(self.registry, self.traffic)


def engine_stats(registry: EngineRegistry, traffic: Traffic) -> dict[str, Any]:
    """What the rollout manager is told about engines and requests."""
    return {
        "in_flight": traffic.in_flight,
        "oldest_request_seconds": traffic.oldest_seconds(),
        "busy_seconds": traffic.busy_seconds(),
        "answers": dict(traffic.completed),
        "failed_tries": traffic.failed,
        "engines": registry.describe(),
        "restarts": {record.engine_id: record.restarts for record in registry.engines.values()},
    }
