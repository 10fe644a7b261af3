"""What a publication costs the driver besides the weights: CPU, and the longest turn of its event loop.

The real publisher, updater, transport, fleet and calls, over real HTTP to hundreds of engines. These are fakes in
another process, which answer every call at once; nothing is sent to them, so the time is that of control alone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from aiohttp import web

from miles_async.arguments.weights import WeightsArguments
from miles_async.engines.external import ExternalServers
from miles_async.engines.fleet import Fleet
from miles_async.engines.http import Http
from miles_async.engines.registry import EngineRegistry
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.sglang.held_report import FINGERPRINT_ACTION, fingerprint, write_report
from miles_async.engines.supervisor import EngineGroup, EngineSupervisor
from miles_async.engines.traffic import Traffic
from miles_async.runtime import garbage
from miles_async.types import HeldPart, HeldWeights, StagedWeights, TensorMeta
from tests.benchmarks.loop_lag import Turns
from tests.benchmarks.report import Row
from tests.fakes.fake_fleet import FakeRouter
from tests.fakes.fake_sides import CANARY_LOGPROBS, DIGEST, FakeTrainer, publish
from tests.fakes.publishers import publisher_of

ENGINES, BUCKETS = 512, 3900
SENDERS = 4
PUBLICATIONS = 3  # the first one makes the process groups; of the others, the least CPU and the longest turn
GOAL_CPU_SECONDS = 5.0
GOAL_TURN_MS = 20.0


class AllEngines:
    """One server for all of them: they differ by their address on the loopback network, 127.0.x.y."""

    def __init__(self, tensors: list[str]) -> None:
        self.version = "default"
        part = HeldPart(offset=0, shape=(2,), strides=(1,), dtype="float32", digest=DIGEST)
        self._report = write_report(HeldWeights(parts=dict.fromkeys(tensors, (part,))))
        self._fingerprint = fingerprint(self._report)
        self.calls = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.calls += 1
        match request.path:
            case "/model_info":
                return web.json_response({"weight_version": self.version})
            case "/server_info":
                return web.json_response({"speculative_algorithm": None})
            case "/weights_checker":
                action = (await request.json())["action"].split()[0]
                answer = self._fingerprint if action == FINGERPRINT_ACTION else self._report
                return web.json_response({"success": True, "ranks": [{"checksums": {action: answer}}]})
            case "/generate":
                scores = [(None, 0, None), *((score, 0, None) for score in CANARY_LOGPROBS)]
                meta = {"weight_version": self.version, "input_token_logprobs": scores}
                return web.json_response({"meta_info": meta})
            case "/update_weights_from_distributed":
                self.version = (await request.json())["weight_version"]
        return web.json_response({"success": True, "message": ""})


def serve(connection: Connection, tensors: list[str]) -> None:
    async def main() -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", AllEngines(tensors).answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", 0, backlog=2 * ENGINES).start()
        connection.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


class Trainer(FakeTrainer):
    """Stages nothing; its manifest is that of a large model."""

    async def stage_weights(self, version: int) -> StagedWeights:
        return self.staged(version)

    def staged(self, version: int) -> StagedWeights:
        return StagedWeights(
            version=version,
            directory="",
            buckets={
                i: (TensorMeta(f"model.layers.{i}.weight", "float32", (2,), DIGEST),) for i in range(self.buckets)
            },
            total_bytes=8 * self.buckets,
            senders=self.senders,
            canary_tokens=(1, 2, 3),
            canary_logprobs=CANARY_LOGPROBS,
        )


async def measure(turns: Turns, engines: int, buckets: int, verify: str) -> Row:
    trainer = Trainer([], buckets=buckets, senders=SENDERS)
    names = [meta.name for bucket in trainer.staged(0).buckets.values() for meta in bucket]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, names), daemon=True)
    process.start()
    port = await asyncio.to_thread(ours.recv)
    registry, http = EngineRegistry(), Http()
    router = FakeRouter(registry)
    addresses = [f"127.0.{1 + index // 200}.{1 + index % 200}:{port}" for index in range(engines)]
    group = EngineGroup(engines=engines, streams=True, launch=ExternalServers(addresses, 60.0, SGLangServer, None))
    supervisor = EngineSupervisor(registry, router, SGLangServer(http), [group])
    await router.start()
    await supervisor.start()
    fleet = Fleet(registry, supervisor, SGLangServer(http), Traffic())
    publisher = publisher_of(trainer, fleet, WeightsArguments(verify_weights=verify))  # type: ignore[arg-type]
    found: list[tuple[float, float, float]] = []
    try:
        for version in range(PUBLICATIONS):
            await asyncio.sleep(0.1)
            # The rollout process does this once. Here it also removes the connections of the publication before, which
            # are cycles in asyncio's loop. They are none in uvloop's, on which the rollout process runs.
            garbage.settle()
            first, cpu, wall = len(turns.cpu), time.process_time(), time.perf_counter()
            publication = await publish(publisher, version)
            assert len(publication.engines) == engines, publication.fenced
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            await asyncio.sleep(0)
            found.append((cpu, wall, max(turns.cpu[first + 1 :])))
    finally:
        process.kill()
        await http.close()
    cpu, wall, _ = min(found[1:])
    turn = max(turn for _, _, turn in found[1:])
    return {
        "engines": engines,
        "buckets": buckets,
        "senders": SENDERS,
        "verify": verify,
        "cpu_seconds": round(cpu, 2),
        "seconds": round(wall, 2),
        "longest_turn_ms": round(turn * 1e3, 1),
        "meets_goal": cpu <= GOAL_CPU_SECONDS and turn * 1e3 <= GOAL_TURN_MS,
    }


def rows(engines: int = ENGINES, buckets: int = BUCKETS) -> Iterator[Row]:
    """One per kind of verification."""
    for verify in ("canary", "full"):
        turns = Turns()
        loop = asyncio.SelectorEventLoop(turns)
        try:
            yield loop.run_until_complete(measure(turns, engines, buckets, verify))
        finally:
            loop.close()
