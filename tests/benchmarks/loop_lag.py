"""How late the rollout side's event loop is with 1,024 requests in flight.

The real dispatcher, pool, client, fleet, publisher and batches over real HTTP, on a real event loop; the engines are
fakes in another process, the trainer only takes time. Answers have hundreds of tokens or 8,192, and are packed as those
of engines that a run starts, or plain JSON as those of external ones. A timer is due every 5 ms, and its delay is
measured, also of those that fell into one long delay: 200 ms of blocking count as 40 late timers. On a busy machine
that says more about the machine. So there is also what the CPU time of the loop's turns would make of timers that
nothing else delays (``turns``, which uvloop does not tell).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from selectors import SelectorKey
from typing import Any, cast

import msgspec
import numpy as np
import uvloop
from aiohttp import web

from miles_async.arguments import EnginesArguments, RolloutArguments, StalenessArguments, WeightsArguments
from miles_async.engines.external import ExternalServers
from miles_async.engines.http import Http
from miles_async.engines.kind import ServerHandle
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.router import Router
from miles_async.engines.sglang.answers import TEXT_FROM
from miles_async.engines.sglang.api import SGLangServer
from miles_async.runtime import garbage
from miles_async.runtime.detokenize import decode_tokens
from miles_async.simulation.distributions import Fixed
from miles_async.simulation.engine import canary_logprobs
from miles_async.simulation.engines import SimulatedEngines
from miles_async.simulation.recording import EventLog
from miles_async.simulation.run import Simulation, quiet_logs
from miles_async.simulation.settings import SimulationSettings
from tests.benchmarks.report import Row
from tests.benchmarks.vocabulary import SIZE, chat, tokenizer
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_fleet import FakeRouter

GOAL_MS = 20.0  # at the 99th percentile
IN_FLIGHT = 1024
ENGINES = 8
GROUPS, SAMPLES = 128, 8  # per step: as many samples as run at once
PERIOD = 0.005
WARM_UP_SECONDS = 10.0  # all requests at once; then they spread


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the engines answer."""

    median_tokens: int
    sigma: float  # lengths are lognormal
    most_tokens: int
    token_seconds: float
    packed: bool = True


WORKLOADS = {
    "450 tokens": Workload(median_tokens=400, sigma=0.5, most_tokens=2048, token_seconds=0.01),
    "8k tokens": Workload(median_tokens=8192, sigma=0.02, most_tokens=8192, token_seconds=0.001),
    "8k tokens, JSON": Workload(median_tokens=8192, sigma=0.02, most_tokens=8192, token_seconds=0.001, packed=False),
}
CASES = (  # workload, --pause-generation-mode, event loop (Ray's actors run on uvloop)
    ("450 tokens", "retract", "asyncio"),
    ("450 tokens", "abort", "asyncio"),
    ("8k tokens", "retract", "asyncio"),
    ("8k tokens", "abort", "asyncio"),
    ("8k tokens", "retract", "uvloop"),
    ("8k tokens", "abort", "uvloop"),
    ("8k tokens, JSON", "retract", "asyncio"),
)

# ------------------------------------------------------------------------------------------------ engines' process


@dataclass
class LeanEngine(FakeEngine):
    """Answers after a drawn time, with the first of the same tokens."""

    workload: Workload = WORKLOADS["450 tokens"]
    chance: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.packs = self.workload.packed
        self._abort_all = asyncio.Event()
        same = random.Random(0)
        self._ids = [same.randrange(SIZE) for _ in range(self.workload.most_tokens)]
        self._logprobs = [(float(np.float32(-same.expovariate(1.0))), token, None) for token in self._ids]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        if "logprob_start_len" in body:
            self.canary_shift = canary_logprobs(int(self.weight_version), 2)[0] + 1.0
            return await super()._generate(request)
        await self._resumed.wait()
        first_version, started = self.weight_version, time.monotonic()
        load, room = self.workload, body["sampling_params"]["max_new_tokens"]
        wanted = min(room, round(self.chance.lognormvariate(np.log(load.median_tokens), load.sigma)))
        reason = "stop"
        try:
            async with asyncio.timeout(wanted * load.token_seconds):
                await self._abort_all.wait()
            reason, wanted = "abort", min(wanted, int((time.monotonic() - started) / load.token_seconds))
        except TimeoutError:
            pass
        spans = [{"version": first_version, "start": 0, "end": wanted}]
        if self.weight_version != first_version:
            spans = [{"version": first_version, "start": 0, "end": wanted // 2}]
            spans += [{"version": self.weight_version, "start": wanted // 2, "end": wanted}]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": reason},
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.weight_version,
            "weight_versions": spans,
            "output_token_logprobs": self._logprobs[:wanted],
        }
        reply = {"text": "word" * wanted, "output_ids": self._ids[:wanted], "meta_info": meta}
        return self._response(reply, body)

    def _text(self, body: dict[str, Any], reply: dict[str, Any]) -> str:
        return decode_tokens(tokenizer(), [*body["input_ids"][body[TEXT_FROM] :], *reply["output_ids"]])

    async def _abort(self, request: web.Request) -> web.Response:
        if (await request.json()).get("abort_all"):
            self._abort_all.set()
            self._abort_all = asyncio.Event()
        return await super()._abort(request)


async def serve(workload: Workload) -> None:
    """Engines that say their URLs on stdout and answer until stdin is closed."""
    chance = random.Random(0)
    async with AsyncExitStack() as stack:
        engines = [LeanEngine(workload=workload, chance=chance) for _ in range(ENGINES)]
        print(json.dumps([(await stack.enter_async_context(engine)).url for engine in engines]), flush=True)
        await asyncio.to_thread(sys.stdin.read)


# ------------------------------------------------------------------------------------------------ our process


class SpreadingRouter(FakeRouter):
    """Sends each request to the next engine."""

    def __init__(self, registry: EngineRegistry, urls: Sequence[str]) -> None:
        self._spread = itertools.cycle(urls)
        super().__init__(registry)

    @property
    def url(self) -> str:
        return next(self._spread)

    @url.setter
    def url(self, _: str) -> None: ...


class HttpEngines(SimulatedEngines):
    """Under the same fleet and client, servers that are there already, each as likely to get a request."""

    def __init__(self, settings: SimulationSettings, log: EventLog, urls: Sequence[str]) -> None:
        self._urls = urls
        super().__init__(settings, log)

    def _session(self) -> Http:
        return Http()

    def _make_router(self, registry: EngineRegistry) -> Router:
        return cast(Router, SpreadingRouter(registry, self._urls))

    def _launch(self, engine_index: int, incarnation: int) -> ServerHandle:
        return ExternalServers([url.removeprefix("http://") for url in self._urls], 30.0, SGLangServer)(
            engine_index, incarnation
        )

    async def stop(self) -> None:
        await super().stop()
        await self.http.close()


class Turns(selectors.DefaultSelector):
    """CPU seconds of every turn of the loop: what a timer that comes due in it has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu: list[float] = []
        self._since = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        self.cpu.append(time.thread_time() - self._since)
        ready = super().select(timeout)
        self._since = time.thread_time()
        return ready

    def delay(self, first: int, seconds: float, share: float) -> float:
        """Of turns from the ``first``, over ``seconds``: what all but this share of timers are not later than."""
        turns = np.sort(self.cpu[first:])[::-1]
        # Of a turn of d seconds, timers that come due in its first d - x seconds are later than x.
        later = np.cumsum(turns) - np.arange(1, len(turns) + 1) * turns  # seconds in which they do, for x = turns[i]
        beyond = int(np.searchsorted(later, share * seconds))
        return float((np.sum(turns[:beyond]) - share * seconds) / beyond) if beyond else 0.0


async def lag(seconds: float) -> list[float]:
    """Delays, in seconds, of a timer that is due every PERIOD."""
    delays: list[float] = []
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        await asyncio.sleep(due - time.perf_counter())
        now = time.perf_counter()
        while due <= now:  # also those that fell into the delay of this one
            delays.append(now - due)
            due += PERIOD
    return delays


async def measure(workload: Workload, mode: str, seconds: float, urls: Sequence[str], turns: Turns) -> Row:
    settings = SimulationSettings(
        rollout=RolloutArguments(
            num_rollout=10**6,
            rollout_batch_size=GROUPS,
            n_samples_per_prompt=SAMPLES,
            rollout_max_response_len=workload.most_tokens,
            rollout_concurrency_per_engine=IN_FLIGHT // ENGINES,
        ),
        staleness=StalenessArguments(max_weight_staleness=4, max_rollout_lead=3),
        weights=WeightsArguments(pause_generation_mode=mode, verify_weights="canary"),
        engines=EnginesArguments(),
        num_engines=ENGINES,
        train_seconds=Fixed(1.0),  # less than the engines need: they are never without work
        publish_seconds=Fixed(0.2),
        trace=False,
    )
    simulation = Simulation(settings, partial(HttpEngines, urls=urls), chat())
    client, generated = simulation.engines.client, simulation.observer.generated
    async with asyncio.TaskGroup() as scope:
        run = scope.create_task(simulation.run())
        await asyncio.sleep(WARM_UP_SECONDS)
        started, cpu, before, first = time.perf_counter(), time.process_time(), generated.total(), len(turns.cpu)
        delays = await lag(seconds)
        wall, cpu, samples = time.perf_counter() - started, time.process_time() - cpu, generated.total() - before
        of_turns: Row = {}
        if len(turns.cpu) > first:
            of_turns["turns_ms_p99"] = round(1e3 * turns.delay(first, wall, 0.01), 1)
            of_turns["turns_ms_max"] = round(1e3 * max(turns.cpu[first:]), 1)
        in_flight = client.in_flight
        run.cancel()
    p50, p99, most = (1e3 * float(np.percentile(delays, q)) for q in (50, 99, 100))
    return {
        "in_flight": in_flight,
        "publications": len(simulation.recording.publications),
        "samples": samples,
        "samples_per_second": round(samples / wall),
        "cpu_us_per_sample": round(1e6 * cpu / samples),
        "lag_ms_p50": round(p50, 1),
        "lag_ms_p99": round(p99, 1),
        "lag_ms_max": round(most, 1),
        **of_turns,
        "meets_goal": p99 < GOAL_MS,
    }


def rows(seconds: float = 30.0) -> Iterator[Row]:
    """One row per case."""
    garbage.settle()  # as the rollout process does
    for name, mode, loop in CASES:
        case = {"answers": name, "pause_mode": mode, "loop": loop}
        yield {**case, **_row(name, mode, loop, seconds)}


def _row(name: str, mode: str, loop: str, seconds: float) -> Row:
    turns = Turns()
    factories = {"asyncio": partial(asyncio.SelectorEventLoop, turns), "uvloop": uvloop.new_event_loop}
    command = [sys.executable, "-m", "tests.benchmarks.loop_lag", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engines, quiet_logs():
        assert engines.stdin is not None
        assert engines.stdout is not None
        try:
            urls = json.loads(engines.stdout.readline())
            with asyncio.Runner(loop_factory=factories[loop]) as runner:
                return runner.run(measure(WORKLOADS[name], mode, seconds, urls, turns))
        finally:
            engines.stdin.close()


if __name__ == "__main__":
    asyncio.run(serve(WORKLOADS[sys.argv[1]]))
