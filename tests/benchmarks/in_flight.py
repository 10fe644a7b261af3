"""How many requests the rollout process carries: 1,000 fake engines over real HTTP, with as many requests in flight as
the limit of open files allows, up to 64 for each engine.

The engines are one other process with a port for each: no more than what reads a request and writes the same packed
answer after a drawn time. The time decides how many requests per second that makes; it is shortened until timers of the
rollout process's event loop are late.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import msgspec
import numpy as np
import psutil

from miles_async.engines.http import Http
from miles_async.engines.sglang.answers import MEDIA_TYPE, pack
from miles_async.engines.traffic import Traffic
from miles_async.runtime import garbage
from miles_async.types import GenerateRequest
from tests.benchmarks.loop_lag import GOAL_MS, Turns, lag
from tests.benchmarks.report import Row
from tests.fakes.clients import client_of, registry_of, serving

ENGINES = 1000
PER_ENGINE = 64
TOKENS = 256  # of an answer, and of a prompt
OTHER_FILES = 2000  # of either process, listening sockets included
RATES = (500, 1000, 1500, 2000, 3000)  # requests per second
SECONDS = 15.0  # per row, after all requests have been answered once

# ------------------------------------------------------------------------------------------------ engines' process


class Connection(asyncio.Protocol):
    """A connection of the client; one request at a time."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
            return
        self._received.clear()
        seconds = json.loads(body)["sampling_params"]["temperature"]
        asyncio.get_running_loop().call_later(seconds, self._transport.write, self._answer)


def answer() -> bytes:
    """The whole response, as SGLang with our plugin writes it."""
    ids = list(range(TOKENS))
    body = pack({"output_ids": ids, "meta_info": {
        "finish_reason": {"type": "length"}, "prompt_tokens": TOKENS, "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": TOKENS}],
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }})  # fmt: skip
    assert body is not None
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
        MEDIA_TYPE.encode(), len(body), body,
    )  # fmt: skip


async def serve() -> None:
    """Says the engines' URLs on stdout and answers until stdin is closed."""
    loop, said = asyncio.get_running_loop(), answer()
    urls = []
    for _ in range(ENGINES):
        server = await loop.create_server(lambda: Connection(said), "127.0.0.1", 0, backlog=1024)
        urls.append("http://{}:{}".format(*server.sockets[0].getsockname()))
    print(json.dumps(urls), flush=True)
    await asyncio.to_thread(sys.stdin.read)


# ------------------------------------------------------------------------------------------------ client's process


def most_in_flight() -> int:
    """Requests that may be in flight here: each takes an open file, in either process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(ENGINES * PER_ENGINE, limit - OTHER_FILES)


async def measure(urls: Sequence[str], in_flight: int, rate: int, turns: Turns) -> Row:
    http, traffic = Http(), Traffic()
    registry = registry_of(*(serving(url, f"engine-{number}", version=0) for number, url in enumerate(urls)))
    engine: ContextVar[str] = ContextVar("engine")  # of a task, so that its connection is used again
    client = client_of(http, registry, engine.get, traffic, request_timeout=600.0, retries=5, backoff_seconds=0.2)
    seconds, chance = in_flight / rate, random.Random(0)
    prompt = np.arange(TOKENS, dtype=np.int32)[::-1].copy()  # other tokens than the answer: an echo is refused
    done = 0

    async def one_after_another(number: int) -> None:
        nonlocal done
        engine.set(urls[number % len(urls)])
        await asyncio.sleep(chance.uniform(0.0, seconds))  # not all in one moment
        while True:
            sampling = {"temperature": seconds * chance.uniform(0.5, 1.5), "max_new_tokens": TOKENS}
            await client.generate(GenerateRequest(input_ids=prompt, sampling=sampling, routing_key=str(number)))
            done += 1

    async with asyncio.TaskGroup() as scope:
        tasks = [scope.create_task(one_after_another(number)) for number in range(in_flight)]
        await asyncio.sleep(2.0 * seconds)
        first, answered, cpu = len(turns.cpu), done, time.process_time()
        started = time.perf_counter()
        delays = await lag(SECONDS)
        wall, cpu, answered = time.perf_counter() - started, time.process_time() - cpu, done - answered
        row = {
            "in_flight": client.in_flight,
            "asked_per_second": rate,
            "requests_per_second": round(answered / wall),
            "cpu_us_per_request": round(1e6 * cpu / answered),
            "of_a_core": round(cpu / wall, 2),
            "lag_ms_p50": round(1e3 * float(np.percentile(delays, 50)), 1),
            "lag_ms_p99": round(1e3 * float(np.percentile(delays, 99)), 1),
            "turns_ms_p99": round(1e3 * turns.delay(first, wall, 0.01), 1),
            "memory_mib": round(psutil.Process().memory_info().rss / 2**20),
        }
        for task in tasks:
            task.cancel()
    await http.close()
    return row


def rows() -> Iterator[Row]:
    """One row per rate, up to the first that is more than can be done."""
    garbage.settle()
    in_flight = most_in_flight()
    for rate in RATES:
        row = one(in_flight, rate)
        yield row
        if row["of_a_core"] > 0.9 or row["requests_per_second"] < 0.6 * rate:
            return


def one(in_flight: int, rate: int) -> Row:
    turns = Turns()

    command = [sys.executable, "-m", "tests.benchmarks.in_flight"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engines:
        assert engines.stdin is not None
        assert engines.stdout is not None
        try:
            urls = msgspec.json.decode(engines.stdout.readline(), type=list[str])
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
                row = runner.run(measure(urls, in_flight, rate, turns))
        finally:
            engines.stdin.close()
    return {**row, "meets_goal": row["turns_ms_p99"] < GOAL_MS}


if __name__ == "__main__":
    asyncio.run(serve())
