"""What the session server adds to a turn, and how many turns it takes in a second of CPU.

Engines are simulated: a turn takes some seconds, spread so that agents don't move in step. Sessions have 8 short turns,
or end with 8k tokens after any number of turns. What is added is the time a turn takes for the agent beyond what the
engine took for it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import msgspec
import numpy as np
import psutil

from miles_async.api import EngineClient
from miles_async.runtime.network.keys import make_run_keys
from miles_async.runtime.processes.child_process import ChildProcess
from miles_async.sessions.service import SessionService
from miles_async.sessions.session import SessionSettings
from miles_async.trajectory.taker import Limits
from miles_async.types import GenerateRequest, Generation, Int32
from miles_async.wiring.session_process import ServerSettings
from tests.benchmarks.report import Row, report
from tests.fakes.chat_formats import chat_format
from tests.fakes.protocol_clients import CLIENTS, PATHS

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "assets" / "reverse" / "model"
TURNS = 8
GOAL = 2000  # turns per second and core of the server
ANSWER = np.array([14, 13, 2], np.int32)  # "21" and <eos>
LONG = 8192  # tokens of a long session


class TimedEngines:
    """An EngineClient that takes ``seconds`` on average for a turn, and remembers how long it really took."""

    def __init__(self, seconds: float, answer: Int32) -> None:
        self._random = random.Random(0)
        self._seconds = seconds
        self._answer = answer
        self.took: dict[str, float] = {}  # routing key → seconds of its last turn

    async def generate(self, request: GenerateRequest) -> Generation:
        started = time.perf_counter()
        await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._seconds)
        self.took[request.routing_key] = time.perf_counter() - started
        return Generation(
            output_ids=self._answer,
            logprobs=np.full(len(self._answer), -0.5, np.float32),
            weight_versions=np.zeros(len(self._answer), np.int32),
            finish_reason="stop",
            engines=("engine-0",),
            prompt_tokens=len(request.input_ids),
        )


async def measure(
    concurrency: int,
    seconds: float,
    log_dir: Path,
    *,
    rounds: int = 1,
    workers: int = 1,
    turns: int = TURNS,
    question: str = "rev",
    answer: Int32 = ANSWER,
    model: Path = MODEL,
    protocol: str = "chat completions",
) -> dict[str, float]:
    """Added seconds per turn and CPU seconds per turn of the server, at so many sessions at once, each followed by
    others until there were ``rounds``.
    """
    engines = TimedEngines(seconds, answer)
    added: list[float] = []

    async def agents(number: int, http: aiohttp.ClientSession) -> None:
        for _ in range(rounds):
            await agent(number, http)

    async def agent(number: int, http: aiohttp.ClientSession) -> None:
        key = f"0-{number}"
        opened = await service.open(
            SessionSettings(
                routing_key=key, sampling={"temperature": 1.0}, limits=Limits(response=2 * LONG, total=2 * LONG)
            )
        )
        await asyncio.sleep(random.uniform(0, seconds))  # agents don't all begin in the same moment
        client = CLIENTS[protocol]()
        for turn in range(turns):
            client.append([{"role": "user", "content": f"{question} {number} {turn}"}])
            body = msgspec.json.encode({"model": "policy", **client.body()})
            started = time.perf_counter()
            async with http.post(f"{opened.base_url}/{PATHS.get(protocol, 'responses')}", data=body) as response:
                assert response.status == 200, await response.text()
                answer = msgspec.json.decode(await response.read())
            added.append(time.perf_counter() - started - engines.took[key])
            client.receive(answer)
        collected = await service.collect(opened)
        assert collected.sample is not None
        assert collected.sample.metadata["turns"] == turns

    async with running(engines, log_dir, model=model, workers=workers) as (service, http, cpu_seconds):
        before, started = cpu_seconds(), time.perf_counter()
        async with asyncio.TaskGroup() as scope:
            for number in range(concurrency):
                scope.create_task(agents(number, http))
        cpu, wall = cpu_seconds() - before, time.perf_counter() - started
    p50, p99 = np.percentile(added, [50, 99])
    return {
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
        "cpu_ms_per_turn": 1e3 * cpu / len(added),
        "turns": len(added),
        "turns_per_second": len(added) / wall,
    }


@asynccontextmanager
async def running(
    engines: EngineClient, log_dir: Path, *, model: Path = MODEL, workers: int = 1
) -> AsyncIterator[tuple[SessionService, aiohttp.ClientSession, Callable[[], float]]]:
    """Yield a service, a client of agents, and what tells the CPU seconds of its processes."""
    settings = ServerSettings(
        hf_checkpoint=str(model), host="127.0.0.1", session_timeout=600.0, tool_call_parser=None, reasoning_parser=None
    )
    children: list[ChildProcess] = []
    keys = make_run_keys({}).sessions
    environment = keys.environment()

    def launch(socket: Path, worker: int, starts: int) -> ChildProcess:
        log_path = log_dir / f"sessions-{worker}.log"
        children.append(ChildProcess("s", settings.command(socket), log_path=log_path, environment=environment))
        return children[-1]

    def cpu_seconds() -> float:
        return sum(sum(psutil.Process(child.pid).cpu_times()[:2]) for child in children)

    service = SessionService(engines, launch, keys=keys, workers=workers)
    await service.start()
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, headers=keys.agents.headers()) as http:
            yield service, http, cpu_seconds
    finally:
        await service.stop()


def rows() -> Iterator[Row]:
    """One row per number of sessions at once. Engines take longer where there are more, so that turns come as fast as
    a fleet would answer them: some hundred per second at most.
    """
    for sessions, seconds in ((1, 1.0), (64, 2.0), (1024, 10.0)):
        with TemporaryDirectory() as directory:
            result = asyncio.run(measure(sessions, seconds, Path(directory)))
        yield {
            "sessions": sessions,
            "turns": int(result["turns"]),
            "added_p50_ms": round(result["p50_ms"], 1),
            "added_p99_ms": round(result["p99_ms"], 1),
            "cpu_ms_per_turn": round(result["cpu_ms_per_turn"], 2),
        }


def rates() -> Iterator[Row]:
    """Turns per second of the server's CPU, when agents ask as fast as they are answered."""
    for workers, sessions, rounds in ((1, 16, 32), (1, 64, 16), (1, 256, 4), (2, 256, 4), (4, 256, 4)):
        with TemporaryDirectory() as directory:
            result = asyncio.run(measure(sessions, 0.02, Path(directory), rounds=rounds, workers=workers))
        per_cpu_second = 1e3 / result["cpu_ms_per_turn"]
        yield {
            "workers": workers,
            "sessions": sessions,
            "turns": int(result["turns"]),
            "turns_per_second": round(result["turns_per_second"]),
            "turns_per_cpu_second": round(per_cpu_second),
            "meets_goal": per_cpu_second >= GOAL,
        }


def protocols() -> Iterator[Row]:
    """Turns per second of the server's CPU by protocol, when agents ask as fast as they are answered."""
    for protocol in CLIENTS:
        with TemporaryDirectory() as directory:
            result = asyncio.run(measure(64, 0.02, Path(directory), rounds=16, protocol=protocol))
        yield {
            "protocol": protocol,
            "turns": int(result["turns"]),
            "turns_per_cpu_second": round(1e3 / result["cpu_ms_per_turn"]),
        }


def lengths() -> Iterator[Row]:
    """Turns per second of the server's CPU in sessions that end with 8k tokens, by their number of turns."""
    chat = chat_format("qwen3")
    text = " The quick brown fox jumps over the lazy dog."
    for turns in (8, 32, 128):
        repeats = LONG // (2 * turns * len(chat.tokenize(text)))
        answer = np.array([*chat.tokenize(text * repeats), *chat.tokenize("<|im_end|>")], np.int32)
        with TemporaryDirectory() as directory:
            chat.tokenizer.save_pretrained(directory)
            result = asyncio.run(
                measure(
                    *(32, 0.02, Path(directory)),
                    rounds=max(1, 64 // turns),
                    turns=turns,
                    question=text * repeats,
                    answer=answer,
                    model=Path(directory),
                )
            )
        yield {
            "turns": turns,
            "new_tokens_per_turn": LONG // turns,
            "turns_per_second": round(result["turns_per_second"]),
            "turns_per_cpu_second": round(1e3 / result["cpu_ms_per_turn"]),
        }


if __name__ == "__main__":
    report("sessions", rows())
