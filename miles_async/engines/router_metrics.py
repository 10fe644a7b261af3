"""The router's own metrics, scraped from smg every few seconds."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

import aiohttp
import structlog
from prometheus_client.parser import text_string_to_metric_families

from miles_async.engines.http import Http

log = structlog.get_logger(__name__)

_SECONDS = 5.0  # from one scrape to the next
_TIMEOUT = aiohttp.ClientTimeout(total=2)

_READ = (
    "smg_worker_pool_size",
    "smg_http_connections_active",
    "smg_router_requests_total",
    "smg_router_upstream_responses_total",
    "smg_router_request_duration_seconds_sum",
    "smg_router_request_duration_seconds_count",
    "smg_consistent_hashing_policy_branch_total",
    "smg_tokio_event_loop_stalls_total",
    "smg_allocator_resident_bytes",
)
"""Names in smg 1.13.0. Most others are histograms, and counters of features that runs don't use."""


class RouterMetrics:
    """The latest values. They stay as they are while the router does not answer: telemetry ends no run (M12)."""

    def __init__(self, http: Http, url: Callable[[], str]) -> None:
        """``url``: current URL of smg's metrics."""
        self.latest: dict[str, float] = {}
        self._http = http
        self._url = url

    async def run(self) -> None:
        while True:
            try:
                async with self._http.session.get(self._url(), timeout=_TIMEOUT, raise_for_status=True) as response:
                    self.latest = router_metrics(await response.text())
            except Exception as error:  # supervision point: see above
                log.debug("no metrics of the router", error=repr(error))
            await asyncio.sleep(_SECONDS)


def router_metrics(text: str) -> dict[str, float]:
    """Parse an answer of smg into name → value. Counts are since its start.

    - ``workers``: registered engines; ``connections``: open connections of clients;
    - ``requests``: routed requests; ``failed_requests``: requests that engines answered with a status other than 200;
    - ``request_seconds/mean``: mean time of a request, including the engine's part;
    - ``affinity``: share of requests that consistent hashing sent where their key belongs;
    - ``stalls``: how often its event loop was late by more than 5 ms; ``resident_bytes``: its resident memory.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    lines = (line for line in text.splitlines() if line.startswith(_READ))
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            name = sample.name.removeprefix("smg_").removesuffix("_total")
            sums[name] += sample.value
            if name == "router_upstream_responses" and sample.labels.get("status_code") != "200":
                sums["failed"] += sample.value
            if sample.labels.get("branch") == "routing_key_hit":
                sums["routing_key_hit"] += sample.value
    found = {
        "workers": sums["worker_pool_size"],
        "connections": sums["http_connections_active"],
        "requests": sums["router_requests"],
        "failed_requests": sums["failed"],
        "stalls": sums["tokio_event_loop_stalls"],
        "resident_bytes": sums["allocator_resident_bytes"],
    }
    if count := sums["router_request_duration_seconds_count"]:
        found["request_seconds/mean"] = sums["router_request_duration_seconds_sum"] / count
    if routed := sums["consistent_hashing_policy_branch"]:
        found["affinity"] = sums["routing_key_hit"] / routed
    return found
