"""What smg measures of itself, among our metrics: scraped every few seconds, beside everything else."""

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
"""Of smg 1.13.0. Most of what it writes are histograms and counters of what we don't use."""


class RouterMetrics:
    """Keeps the last values. A router that doesn't answer leaves them as they are: telemetry ends no run (M12)."""

    def __init__(self, http: Http, url: Callable[[], str]) -> None:
        """``url``: of smg's metrics, at the moment."""
        self.latest: dict[str, float] = {}
        self._http = http
        self._url = url

    async def run(self) -> None:
        """Scrape, for ever."""
        while True:
            try:
                async with self._http.session.get(self._url(), timeout=_TIMEOUT, raise_for_status=True) as response:
                    self.latest = router_metrics(await response.text())
            except Exception as error:  # supervision point: see above
                log.debug("no metrics of the router", error=repr(error))
            await asyncio.sleep(_SECONDS)


def router_metrics(text: str) -> dict[str, float]:
    """Name → value, of what is in an answer of smg. Counts are since it started.

    - ``workers``: engines that it knows; ``connections``: open ones of clients;
    - ``requests``, ``failed_requests``: routed; answered by engines with another status than 200;
    - ``request_seconds/mean``: of a request, the engine's part included;
    - ``affinity``: share of requests that consistent hashing sent where their key belongs;
    - ``stalls``: times that its event loop was late by more than 5 ms; ``resident_bytes``: of its memory.
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
