"""smg's own metrics become metrics of the run; failing to read them harms nothing.

# covers: M12
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web

from miles_async.engines import router_metrics as module
from miles_async.engines.http import Http
from miles_async.engines.router_metrics import RouterMetrics, router_metrics

SCRAPED = """\
# HELP smg_worker_pool_size Current worker pool size
# TYPE smg_worker_pool_size gauge
smg_worker_pool_size{worker_type="regular",connection_mode="http",model="a"} 3
smg_worker_pool_size{worker_type="regular",connection_mode="http",model="b"} 1
smg_http_connections_active 7
# TYPE smg_router_requests_total counter
smg_router_requests_total{router_type="http",endpoint="generate"} 40
# TYPE smg_router_upstream_responses_total counter
smg_router_upstream_responses_total{router_type="http",status_code="200",error_code=""} 38
smg_router_upstream_responses_total{router_type="http",status_code="503",error_code="x"} 2
# TYPE smg_router_request_duration_seconds histogram
smg_router_request_duration_seconds_bucket{endpoint="generate",le="0.001"} 0
smg_router_request_duration_seconds_sum{endpoint="generate"} 100
smg_router_request_duration_seconds_count{endpoint="generate"} 40
smg_consistent_hashing_policy_branch_total{branch="routing_key_hit"} 30
smg_consistent_hashing_policy_branch_total{branch="random_fallback"} 10
smg_tokio_event_loop_stalls_total 6
smg_allocator_resident_bytes 8282112
smg_worker_retries_total{worker_type="regular"} 9
this line is nothing at all
"""


def test_values_are_added_up_over_labels() -> None:
    assert router_metrics(SCRAPED) == {
        "workers": 4.0,
        "connections": 7.0,
        "requests": 40.0,
        "failed_requests": 2.0,
        "request_seconds/mean": 2.5,
        "affinity": 0.75,
        "stalls": 6.0,
        "resident_bytes": 8282112.0,
    }


def test_nothing_is_divided_by_nothing() -> None:
    found = router_metrics("")
    assert found["requests"] == 0
    assert not {"request_seconds/mean", "affinity"} & found.keys()


@asynccontextmanager
async def answering(*answers: str | int | None) -> AsyncIterator[RouterMetrics]:
    """Scrapes of a server that gives these answers, one after the other: a text, a status, or None for silence."""
    remaining = list(answers)

    async def respond(request: web.Request) -> web.Response:
        answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        if answer is None:
            await asyncio.sleep(60)
        return web.Response(status=answer) if isinstance(answer, int) else web.Response(text=answer)

    app = web.Application()
    app.router.add_get("/metrics", respond)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = Http()
    metrics = RouterMetrics(http, lambda: f"http://127.0.0.1:{runner.addresses[0][1]}/metrics")
    scraping = asyncio.create_task(metrics.run())
    try:
        yield metrics
        assert not scraping.done()
    finally:
        scraping.cancel()
        with suppress(asyncio.CancelledError):
            await scraping
        await http.close()
        await runner.cleanup()


async def test_they_follow_the_router_and_outlast_its_silence_and_its_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.01)
    monkeypatch.setattr(module, "_TIMEOUT", module.aiohttp.ClientTimeout(total=0.2))
    connections = "smg_http_connections_active {}\n".format
    answers = (connections(1), None, 500, connections("many"), connections(2))
    async with answering(*answers) as metrics, asyncio.timeout(10):
        seen = []
        while not seen or seen[-1] != 2:
            if metrics.latest and [metrics.latest["connections"]] != seen[-1:]:
                seen.append(metrics.latest["connections"])
            await asyncio.sleep(0.001)
    assert seen == [1.0, 2.0]


async def test_a_router_that_is_down_is_nobodys_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.01)
    http = Http()
    for url in ("http://127.0.0.1:1/metrics", ""):  # the latter before it was started
        metrics = RouterMetrics(http, lambda url=url: url)  # type: ignore[misc]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await metrics.run()
        assert metrics.latest == {}
    await http.close()
