"""What a request costs on its way: to an engine directly, through the router, through our client and the router; and
how many requests per second the client's event loop takes before it falls behind.

One fake engine in another process answers the same after a given time. What is added is the time beyond that.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import psutil
from aiohttp import web

from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.router import Router
from miles_async.runtime import garbage
from miles_async.types import GenerateRequest
from tests.benchmarks.loop_lag import GOAL_MS, lag
from tests.benchmarks.report import Row
from tests.fakes.clients import client_of, serving
from tests.fakes.fake_engine import FakeEngine

TOKENS = 256  # of an answer
LOADS = ((1, 0.1), (64, 0.25), (1024, 4.0))  # requests at once, and seconds that the engine takes
SECONDS = 8.0  # per row
FIRST_RATE, LAST_RATE = 64, 4096  # requests per second
RATE_SECONDS = 5.0

Request = Callable[[float], Awaitable[None]]  # takes the seconds that the engine is to take


class FixedEngine(FakeEngine):
    """Answers the same after as many seconds as the temperature says."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = list(range(TOKENS))
        self._answer = msgspec.json.encode({"output_ids": ids, "meta_info": {
            "finish_reason": {"type": "length"}, "prompt_tokens": 1, "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": TOKENS}],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }})  # fmt: skip

    async def _generate(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        await asyncio.sleep(body["sampling_params"]["temperature"])
        return web.Response(body=self._answer, headers={"x-smg-routed-worker-id": self.url})


async def serve() -> None:
    """Says its URL on stdout and answers until stdin is closed."""
    async with FixedEngine(weight_version="0", name_worker=False) as engine:
        print(engine.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


@dataclass(frozen=True)
class Bench:
    """The three ways, and who takes part in them."""

    ways: dict[str, Request]
    router: psutil.Process
    http: Http


@asynccontextmanager
async def bench(engine_url: str, log_dir: Path, *, with_router: bool = True) -> AsyncIterator[Bench]:
    registry, http = EngineRegistry(), Http()
    router = Router(registry, http, log_dir=log_dir)
    await router.start()
    await router.add(engine_url)
    registry.engines["engine-0"] = serving(engine_url, version=0)
    registry.notify()
    client = client_of(http, registry, lambda: router.url if with_router else engine_url)

    def to(url: str) -> Request:
        async def request(seconds: float) -> None:
            body = {"input_ids": [1], "sampling_params": {"temperature": seconds}, "return_logprob": True}
            async with http.session.post(f"{url}/generate", data=msgspec.json.encode(body), headers=JSON) as response:
                assert response.status == 200, await response.text()
                await response.read()

        return request

    async def generate(seconds: float) -> None:
        sampling = {"temperature": seconds, "max_new_tokens": TOKENS}
        await client.generate(
            GenerateRequest(input_ids=np.array([1], np.int32), sampling=sampling, routing_key=str(time.time()))
        )

    ways = {"engine": to(engine_url), "router": to(router.url), "client and router": generate}
    try:
        yield Bench(ways, psutil.Process(await router.pid()), http)
    finally:
        await router.stop()
        await http.close()


JSON = {"Content-Type": "application/json"}


async def measure(request: Request, router: psutil.Process, at_once: int, seconds: float) -> dict[str, float]:
    """Milliseconds added per request; CPU per request of this process and of the router, in microseconds."""
    added: list[float] = []
    end = time.perf_counter() + SECONDS

    async def one_after_another() -> None:
        while (started := time.perf_counter()) < end:
            await request(seconds)
            added.append(time.perf_counter() - started - seconds)

    cpu, router_cpu = time.process_time(), sum(router.cpu_times()[:2])
    async with asyncio.TaskGroup() as scope:
        for number in range(at_once):
            scope.create_task(one_after_another())
            if number % 16 == 0:
                await asyncio.sleep(0.2 * seconds / at_once * 16)  # not all in one moment
    cpu, router_cpu = time.process_time() - cpu, sum(router.cpu_times()[:2]) - router_cpu
    p50, p99 = np.percentile(added, [50, 99])
    return {
        "requests": len(added),
        "added_p50_ms": round(1e3 * p50, 2),
        "added_p99_ms": round(1e3 * p99, 2),
        "our_cpu_us": round(1e6 * cpu / len(added)),
        "router_cpu_us": round(1e6 * router_cpu / len(added)),
    }


async def added(engine_url: str) -> list[Row]:
    """Ways and loads."""
    with TemporaryDirectory() as directory:
        async with bench(engine_url, Path(directory)) as ready:
            return [
                {"at_once": at_once, "way": way, **await measure(request, ready.router, at_once, seconds)}
                for at_once, seconds in LOADS
                for way, request in ready.ways.items()
            ]


async def rate(engine_url: str) -> list[Row]:
    """Requests per second by our client alone, doubled until timers of its loop are late."""
    found: list[Row] = []
    per_second = FIRST_RATE
    with TemporaryDirectory() as directory:
        async with bench(engine_url, Path(directory), with_router=False) as ready:
            while per_second <= LAST_RATE and (not found or found[-1]["lag_ms_p99"] < GOAL_MS):
                found.append(await _at_rate(ready.ways["client and router"], per_second))
                per_second *= 2
    return found


async def _at_rate(request: Request, per_second: int) -> Row:
    tasks: set[asyncio.Task[object]] = set()

    async def arrivals() -> None:
        due = time.perf_counter()
        while True:
            tasks.add(task := asyncio.ensure_future(request(0.5)))
            task.add_done_callback(tasks.discard)
            due += 1 / per_second
            await asyncio.sleep(due - time.perf_counter())

    arriving = asyncio.ensure_future(arrivals())
    cpu = time.process_time()
    delays = await lag(RATE_SECONDS)
    cpu = time.process_time() - cpu
    arriving.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "requests_per_second": per_second,
        "lag_ms_p50": round(1e3 * float(np.percentile(delays, 50)), 1),
        "lag_ms_p99": round(1e3 * float(np.percentile(delays, 99)), 1),
        "cpu_us_per_request": round(1e6 * cpu / RATE_SECONDS / per_second),
    }


def _against_engine(measure_all: Callable[[str], Awaitable[list[Row]]]) -> list[Row]:
    garbage.settle()
    command = [sys.executable, "-m", "tests.benchmarks.requests"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        try:
            return asyncio.run(measure_all(engine.stdout.readline().strip()))  # type: ignore[arg-type]
        finally:
            engine.stdin.close()


def rows() -> Iterator[Row]:
    """What a request costs, by way and load."""
    yield from _against_engine(added)


def rates() -> Iterator[Row]:
    """How many requests per second the loop takes."""
    yield from _against_engine(rate)


if __name__ == "__main__":
    asyncio.run(serve())
