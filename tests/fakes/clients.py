"""Clients of engines, and registries of engines that serve, as tests and benchmarks make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_async.engines.client import RouterClient
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.traffic import Traffic


def serving(url: str | None, engine_id: str = "engine-0", **fields: Any) -> EngineRecord:
    """An engine that serves and is verified, but for ``fields``."""
    return EngineRecord(engine_id, **{"state": EngineState.SERVING, "url": url, "verified": True, **fields})


def registry_of(*records: EngineRecord, version: int = 0, router_up: bool = True) -> EngineRegistry:
    return EngineRegistry({record.engine_id: record for record in records}, version, router_up)


def client_of(
    http: Http, registry: EngineRegistry, router_url: Callable[[], str], traffic: Traffic | None = None, **settings: Any
) -> RouterClient:
    """A client of SGLang's servers that waits for a minute and tries once, but for ``settings``."""
    settings = {"request_timeout": 60.0, "retries": 0, "gate_timeout": 60.0, "backoff_seconds": 0.01} | settings
    return RouterClient(SGLangServer(http), http, registry, traffic or Traffic(), router_url=router_url, **settings)
