"""What streams cost: until the text of a token is at the agent, and in CPU time per token.

Sessions of one turn of 200 tokens, all at once. Each token is a character, and simulated engines sample one every 25
ms. The same turns are also taken without streams. The cost of the client of engines is measured apart, with a fake
engine in another process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import msgspec
import numpy as np

from miles_async.engines.client import RouterClient
from miles_async.engines.http import Http
from miles_async.seams.streams import OnTokens
from miles_async.sessions.service import SessionService
from miles_async.sessions.session import SessionSettings
from miles_async.trajectory.taker import Limits
from miles_async.types import GenerateRequest, Generation
from tests.benchmarks.report import Row
from tests.benchmarks.sessions import running
from tests.fakes.clients import client_of, registry_of, serving
from tests.fakes.fake_engine import FakeEngine

TOKENS = 200
TOKEN_SECONDS = 0.025
DIGIT, EOS = 14, 2  # "2" and <eos>
OUTPUT = np.array([DIGIT] * (TOKENS - 1) + [EOS], np.int32)


class SteadyEngines:
    """A ``StreamingClient`` that samples a token every ``TOKEN_SECONDS``, and remembers when."""

    def __init__(self) -> None:
        self.sampled: dict[str, list[float]] = {}  # routing key → time of each token

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self.stream(request, lambda at, token_ids: None)

    async def stream(self, request: GenerateRequest, on_tokens: OnTokens) -> Generation:
        times = self.sampled[request.routing_key] = []
        started = time.perf_counter()
        for at in range(TOKENS):
            await asyncio.sleep(started + (at + 1) * TOKEN_SECONDS - time.perf_counter())
            times.append(time.perf_counter())
            on_tokens(at, OUTPUT[at : at + 1].tolist())
        return Generation(
            output_ids=OUTPUT,
            logprobs=np.full(TOKENS, -0.5, np.float32),
            weight_versions=np.zeros(TOKENS, np.int32),
            finish_reason="stop",
            engines=("engine-0",),
            prompt_tokens=len(request.input_ids),
        )


async def measure(sessions: int, streams: bool, log_dir: Path) -> Row:
    """Milliseconds from a token to its text at the agent, and CPU microseconds of the server per token."""
    engines, waited = SteadyEngines(), list[float]()

    async def agent(number: int, service: SessionService, http: aiohttp.ClientSession) -> None:
        key = f"0-{number}"
        opened = await service.open(
            SessionSettings(routing_key=key, sampling={"temperature": 1.0}, limits=Limits(response=1000, total=1000))
        )
        await asyncio.sleep(random.uniform(0, TOKENS * TOKEN_SECONDS))
        messages = [{"role": "user", "content": f"rev {number}"}]
        body = {"model": "policy", "messages": messages, "stream": streams}
        shown = 0
        async with http.post(f"{opened.base_url}/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            if not streams:
                shown = len(msgspec.json.decode(await response.read())["choices"][0]["message"]["content"])
                waited.extend(time.perf_counter() - at for at in engines.sampled[key])
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                for choice in msgspec.json.decode(line.removeprefix(b"data: "))["choices"]:
                    new = len(choice["delta"].get("content") or "")
                    waited.extend(time.perf_counter() - at for at in engines.sampled[key][shown : shown + new])
                    shown += new
        assert shown == TOKENS - 1
        collected = await service.collect(opened)
        assert collected.sample is not None
        assert collected.sample.tokens[collected.sample.loss_mask == 1].tolist() == OUTPUT.tolist()

    async with running(engines, log_dir) as (service, http, cpu_seconds):
        before = cpu_seconds()
        async with asyncio.TaskGroup() as scope:
            for number in range(sessions):
                scope.create_task(agent(number, service, http))
        cpu = cpu_seconds() - before
    p50, p99 = np.percentile(waited, [50, 99])
    return {
        "sessions": sessions,
        "streams": streams,
        "text_after_p50_ms": round(1e3 * p50, 1),
        "text_after_p99_ms": round(1e3 * p99, 1),
        "server_cpu_us_per_token": round(1e6 * cpu / sessions / TOKENS, 1),
    }


def rows() -> Iterator[Row]:
    """One row per number of sessions, with and without streams."""
    for sessions in (1, 50, 200):
        for streams in (False, True):
            with TemporaryDirectory() as directory:
                yield asyncio.run(measure(sessions, streams, Path(directory)))


# --------------------------------------------------------------------------------------- the client of engines
def _serve(pipe: Connection) -> None:
    async def serve() -> None:
        async with FakeEngine(weight_version="0", token_seconds=TOKEN_SECONDS) as engine:
            pipe.send(engine.url)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[RouterClient]:
    http = Http()
    yield client_of(http, registry_of(serving(url)), lambda: url, request_timeout=300.0)
    await http.close()


async def _ask(url: str, streams: bool, requests: int) -> float:
    """CPU seconds."""

    def on_tokens(at: int, token_ids: Sequence[int]) -> None:
        pass

    sampling = {"max_new_tokens": TOKENS}
    request = GenerateRequest(input_ids=np.array([5, 6, 7], np.int32), sampling=sampling, routing_key="a")
    async with _client(url) as client, asyncio.TaskGroup() as scope:
        before = time.process_time()
        for _ in range(requests):
            scope.create_task(client.stream(request, on_tokens) if streams else client.generate(request))
    return time.process_time() - before


def client() -> Iterator[Row]:
    """CPU time of the process that has the client of engines, per token."""
    ours, theirs = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    engine.start()
    url, requests = ours.recv(), 64
    for streams in (False, True):
        seconds = asyncio.run(_ask(url, streams, requests))
        yield {"streams": streams, "client_cpu_us_per_token": round(1e6 * seconds / requests / TOKENS, 1)}
    ours.send(None)
    engine.join()
