"""Client processes send requests as the rollout process would, and a process that is lost costs tries, nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from aiohttp import web

from miles_async.engines.client import RouterClient
from miles_async.engines.http import Http
from miles_async.engines.posting import processes as processes_module
from miles_async.engines.posting.http_post import ROUTED_WORKER, ROUTING_KEY, Answer, Post, posting_over
from miles_async.engines.posting.processes import ClientProcesses, client_process
from miles_async.engines.registry import EngineRecord, EngineRegistry, EngineState
from miles_async.engines.sglang.api import SGLangServer
from miles_async.engines.traffic import Traffic
from miles_async.errors import EngineError, EngineStartError, TransientEngineError
from miles_async.runtime.network.tls import Tls
from miles_async.runtime.tasks import gathered
from miles_async.staleness.versions import parse_spans
from miles_async.types import GenerateRequest
from tests.fakes.certificates import Authority, needs_openssl
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.keys import KEYS

KEYS_OF_TWO = ("d", "a")  # routing keys of process 0 and of process 1


@dataclass
class Echo:
    """A server that answers with what it was sent, in the order that requests ask for."""

    url: str = ""
    keys: set[str] = field(default_factory=set)  # Authorization headers
    held: asyncio.Event = field(default_factory=asyncio.Event)  # a request that is never answered has come
    given_up: asyncio.Event = field(default_factory=asyncio.Event)  # its connection was closed

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.keys.add(request.headers.get("Authorization", ""))
        asked = msgspec.json.decode(body)
        if asked.get("hold"):
            self.held.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.set()
        for _ in range(asked.get("turns", 0)):  # so that answers overtake each other
            await asyncio.sleep(0)
        return web.Response(
            status=asked.get("status", 200),
            body=body + b"x" * asked.get("more", 0),
            content_type=f"test/{request.headers[ROUTING_KEY]}",
            headers={ROUTED_WORKER: asked["worker"]} if "worker" in asked else {},
        )


@asynccontextmanager
async def listening() -> AsyncIterator[Echo]:
    echo = Echo()
    app = web.Application()
    app.add_routes([web.post("/generate", echo.answer)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    host, port = runner.addresses[0][:2]
    echo.url = f"http://{host}:{port}"
    try:
        yield echo
    finally:
        await runner.cleanup()


@asynccontextmanager
async def started(
    logs: Path, count: int = 1, *, max_restarts: int = 3, tls: Tls | None = None
) -> AsyncIterator[ClientProcesses]:
    """Client processes that nobody watches."""
    launch = client_process("/generate", logs, KEYS.engines, tls)
    clients = ClientProcesses(count, launch, max_restarts=max_restarts, restart_window=3600.0)
    try:
        await clients.start()
        yield clients
    finally:
        await clients.stop()


@asynccontextmanager
async def supervised(clients: ClientProcesses) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as scope:
        watching = scope.create_task(clients.supervise())
        yield
        watching.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def kill(clients: ClientProcesses, number: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    os.kill(clients.processes[number].child.pid, with_signal)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def body(**asked: object) -> bytes:
    return msgspec.json.encode(asked)


async def check_answers(post: Post, echo: Echo) -> None:
    """Answers, statuses, errors and cancellation go through ``post`` as they are."""
    assert await post(echo.url, "a", body(name="plain")) == Answer(
        status=200, content_type="test/a", engine_url=echo.url, body=body(name="plain")
    )
    routed = await post(echo.url, "c", body(status=503, worker="http://engine-3"))
    assert (routed.status, routed.content_type, routed.engine_url) == (503, "test/c", "http://engine-3")
    large = await post(echo.url, "a", body(more=3 << 20))
    assert len(large.body) == len(body(more=3 << 20)) + (3 << 20)
    assert echo.keys == {f"Bearer {KEYS.engines.api.reveal()}"}
    with pytest.raises(TransientEngineError, match=r"connection to http://127\.0\.0\.1:.* failed: ClientConn"):
        await post(f"http://127.0.0.1:{closed_port()}", "a", body())
    waiting = asyncio.ensure_future(post(echo.url, "a", body(hold=True)))
    await echo.held.wait()
    assert not echo.given_up.is_set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(100):
        await echo.given_up.wait()


async def test_the_rollout_process_posts() -> None:  # covers: A3, C13
    http = Http(KEYS.engines)
    async with listening() as echo:
        await check_answers(posting_over(http, "/generate"), echo)
        await http.close()


async def test_client_processes_post_alike(tmp_path: Path) -> None:  # covers: A3, C13
    """Two of them, also thousands of requests at once, none of which gets another's answer."""
    async with listening() as echo, started(tmp_path, 2) as clients:
        assert [zlib.crc32(key.encode()) % 2 for key in KEYS_OF_TWO] == [0, 1]
        await check_answers(clients.post, echo)
        for process in clients.processes:
            shown = " ".join(psutil.Process(process.child.pid).cmdline())
            assert "miles_async.engines.posting.process" in shown
            assert not any(key.reveal() in shown for key in (KEYS.engines.api, KEYS.engines.admin))
            assert KEYS.engines.admin.reveal() not in psutil.Process(process.child.pid).environ().values()

        async def one(number: int) -> None:
            asked = body(number=number, turns=number * 7919 % 50, more=number * 31 % 900)
            answer = await clients.post(echo.url, str(number), asked)
            assert (answer.content_type, answer.body.rstrip(b"x")) == (f"test/{number}", asked)

        for first in range(0, 2000, 500):  # as many connections as open files allow everywhere
            await gathered(*(one(number) for number in range(first, first + 500)))


async def test_a_process_that_dies_costs_its_requests_a_try(tmp_path: Path) -> None:  # covers: A3, C10
    async with listening() as echo, started(tmp_path, 2) as clients, supervised(clients):
        waiting = [asyncio.ensure_future(clients.post(echo.url, key, body(hold=True))) for key in KEYS_OF_TWO]
        await echo.held.wait()
        lost = clients.processes[0].child
        kill(clients, 0)
        with pytest.raises(TransientEngineError, match="client process 0 is gone"):
            await waiting[0]
        await until(lambda: clients.processes[0].child is not lost)
        assert (await clients.post(echo.url, KEYS_OF_TWO[0], body(name="again"))).body == body(name="again")
        assert not waiting[1].done(), "the other process goes on"
        waiting[1].cancel()


async def test_a_process_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # covers: C10
    async with listening() as echo, started(tmp_path) as clients:
        monkeypatch.setattr(processes_module, "_SILENT_SECONDS", 2)
        async with supervised(clients):
            hung = clients.processes[0].child
            kill(clients, 0, signal.SIGSTOP)
            with pytest.raises(TransientEngineError, match="client process 0 is gone"):
                await clients.post(echo.url, "a", body(hold=True))
            monkeypatch.undo()
            await until(lambda: clients.processes[0].child is not hung)
            assert (await clients.post(echo.url, "a", body())).status == 200
            assert not psutil.pid_exists(hung.pid)


async def test_a_process_that_dies_too_often_ends_the_run(tmp_path: Path) -> None:  # covers: C10
    async with started(tmp_path, max_restarts=0) as clients:
        kill(clients, 0)
        with pytest.raises(EngineError, match=r"restarted 0 times in 3600 s \(--engine-max-restarts.*status -9"):
            await clients.supervise()
        with pytest.raises(TransientEngineError, match="client process 0 is gone"):
            await clients.post("http://127.0.0.1:1", "a", body())


async def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    absent = Tls(certificate="/absent", key="/absent", ca="/absent/authorities.pem")
    with pytest.raises(EngineStartError, match=r"client process 0 ended with status 1(.|\n)*--tls-ca /absent/auth"):
        async with started(tmp_path, tls=absent):
            pass


async def test_a_process_ends_with_the_connection_to_the_rollout_process(tmp_path: Path) -> None:  # covers: A7
    """Also where the kernel does not end it with its parent."""
    async with listening() as echo, started(tmp_path) as clients:
        waiting = asyncio.ensure_future(clients.post(echo.url, "a", body(hold=True)))
        await echo.held.wait()
        clients.processes[0].link.cut()
        await until(lambda: clients.processes[0].child.returncode == 0)
        await asyncio.gather(waiting, return_exceptions=True)


@needs_openssl
async def test_generation_over_tls_survives_a_client_process(tmp_path: Path) -> None:  # covers: A3, C13
    """The client itself over client processes: one more try, which the sample does not notice."""
    tls = Authority.make(tmp_path / "authority").issue("127.0.0.1")
    http = Http(KEYS.engines, tls)
    async with (
        FakeEngine(weight_version="3", tls=tls) as engine,
        started(tmp_path, tls=tls) as clients,
        supervised(clients),
    ):
        record = EngineRecord(engine_id="engine-0", state=EngineState.SERVING, url=engine.url, verified=True)
        registry = EngineRegistry(engines={"engine-0": record}, version=3, router_up=True)
        traffic = Traffic()
        client = RouterClient(
            SGLangServer(http), clients.post, registry, traffic, router_url=lambda: engine.url,
            parse_versions=parse_spans, request_timeout=100.0, retries=5, gate_timeout=100.0,
        )  # fmt: skip
        engine.token_seconds = 1000.0
        request = GenerateRequest(input_ids=np.array([5, 6], np.int32), sampling={"max_new_tokens": 4}, routing_key="a")
        async with asyncio.TaskGroup() as scope:
            generating = scope.create_task(client.generate(request))
            await until(lambda: len(engine.requests) == 1)
            engine.token_seconds = 0.001
            kill(clients, 0)
        generation = generating.result()
        assert (len(generation.output_ids), generation.engine_id) == (4, "engine-0")
        assert len({sent["rid"] for sent in engine.requests}) == len(engine.requests) == 2
        assert engine.aborted_ids[0] == engine.requests[0]["rid"], "the engine works for nobody"
        await http.close()
