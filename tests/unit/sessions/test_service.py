"""The session server's workers: who has which session, and what the end of one costs the sessions of others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from miles_async.api import EngineClient
from miles_async.errors import EngineError, EngineStartError, TransientEngineError
from miles_async.sessions.engine_link import EngineLink
from miles_async.sessions.server import SessionServer
from miles_async.sessions.service import SessionService
from miles_async.sessions.session import SessionSettings
from miles_async.trajectory.taker import Limits
from miles_async.types import OpenSession
from miles_async.wiring.session_process import serve_sessions
from tests.fakes.keys import KEYS
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.session_agents import QUESTION, make_trajectory, says
from tests.waiting import until


def settings(key: str = "7-1") -> SessionSettings:
    return SessionSettings(routing_key=key, sampling={"temperature": 1.0}, limits=Limits(response=500, total=900))


class Worker:
    """A worker's process as a task: what the process runs, with a trajectory that needs no model directory."""

    def __init__(self, socket: Path, *, timeout: float, may_start: asyncio.Event | None) -> None:
        self.socket = socket
        self.timeout = timeout
        self.may_start = may_start  # None: it ends at once
        self.task: asyncio.Future[None] | None = None

    def start(self) -> None:
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        if self.may_start is None:
            return
        await self.may_start.wait()
        link = await EngineLink.connect(self.socket)
        server = SessionServer(link, make_trajectory, keys=KEYS.sessions, session_timeout=self.timeout)
        await serve_sessions(server, link, "127.0.0.1")

    async def wait(self) -> int:
        assert self.task is not None
        await asyncio.wait([self.task])
        return -9

    async def stop(self, grace_seconds: float = 0.0) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])

    def tail(self, lines: int = 30) -> str:
        return "the end of its log"


class Workers:
    """Launches them. Starts wait for ``may_start``."""

    def __init__(self, timeout: float = 60.0, *, broken: bool = False) -> None:
        self.timeout = timeout
        self.broken = broken
        self.running: dict[int, Worker] = {}  # newest start of each
        self.may_start = asyncio.Event()
        self.may_start.set()

    def __call__(self, socket: Path, worker: int, starts: int) -> Worker:
        may_start = None if self.broken else self.may_start
        self.running[worker] = Worker(socket, timeout=self.timeout, may_start=may_start)
        return self.running[worker]

    async def kill(self, service: SessionService, worker: int) -> None:
        """Returns when the service knows; the next start waits."""
        self.may_start.clear()
        task = self.running[worker].task
        assert task is not None
        task.cancel()
        await until(lambda: service.workers[worker].url is None)


@asynccontextmanager
async def service_of(
    launch: Workers, model: EngineClient | None = None, *, seconds: float = 20.0, **options: object
) -> AsyncIterator[tuple[SessionService, asyncio.Future[None]]]:
    """(the service, its supervision)."""
    service = SessionService(model or ScriptedModel(says("68")), launch, keys=KEYS.sessions, **options)
    supervision: asyncio.Future[None] | None = None
    try:
        async with asyncio.timeout(seconds):
            await service.start()
            supervision = asyncio.ensure_future(service.supervise())
            yield service, supervision
    finally:
        if supervision is not None:
            supervision.cancel()
            await asyncio.gather(supervision, return_exceptions=True)
        await service.stop()


async def turn(session: OpenSession, url: str | None = None) -> int:
    """Status of a turn of the session's agent, at ``url`` instead of the session's."""
    async with (
        aiohttp.ClientSession(headers=KEYS.sessions.agents.headers()) as http,
        http.post(
            f"{url or session.base_url}/chat/completions", json={"model": "policy", "messages": [QUESTION]}
        ) as response,
    ):
        return response.status


async def test_new_sessions_go_to_the_worker_with_the_fewest_and_stay_there() -> None:
    async with service_of(Workers(), workers=3) as (service, _):
        opened = [await service.open(settings(f"{n}-0")) for n in range(6)]
        assert sorted(Counter(session.instance_id for session in opened).values()) == [2, 2, 2]
        assert {worker.instance_id for worker in service.workers} == {session.instance_id for session in opened}
        for session in opened:
            assert await turn(session) == 200
            others = {worker.url for worker in service.workers if worker.instance_id != session.instance_id}
            for other in others:  # none of which has ever heard of it
                assert await turn(session, f"{other}/sessions/{session.session_id}/v1") == 404
        emptied = opened[0].instance_id
        for session in opened:
            if session.instance_id == emptied:
                assert (await service.collect(session)).sample is not None
        assert [(await service.open(settings())).instance_id for _ in range(2)] == [emptied] * 2


async def test_sessions_that_are_opened_at_once_are_spread_too() -> None:
    async with service_of(Workers(), workers=2) as (service, _):
        opened = await asyncio.gather(*(service.open(settings(f"{n}-0")) for n in range(8)))
        assert sorted(Counter(session.instance_id for session in opened).values()) == [4, 4]
        await service.abandon(opened[0])
        assert (await service.open(settings())).instance_id == opened[0].instance_id


async def test_a_worker_that_dies_costs_its_own_sessions_and_new_ones_go_to_the_others_meanwhile() -> None:
    # covers: M13
    launch = Workers()
    async with service_of(launch, workers=2) as (service, _):
        opened = [await service.open(settings(f"{n}-0")) for n in range(4)]
        dead = service.workers[0]
        lost = [session for session in opened if session.instance_id == dead.instance_id]
        kept = [session for session in opened if session not in lost]
        assert len(lost) == 2
        await launch.kill(service, 0)
        assert {(await service.open(settings())).instance_id for _ in range(3)} == {kept[0].instance_id}
        for session in lost:
            with pytest.raises(TransientEngineError, match=r"does not answer|session lost"):
                await service.collect(session)
        for session in kept:
            assert await turn(session) == 200
            assert (await service.collect(session)).sample is not None
        assert dead.url is None


async def test_a_worker_that_was_restarted_takes_sessions_again() -> None:
    # covers: M13
    launch = Workers()
    async with service_of(launch, workers=2) as (service, _):
        before = service.workers[0].instance_id
        await launch.kill(service, 0)
        launch.may_start.set()
        await until(lambda: service.workers[0].url is not None)
        assert service.workers[0].instance_id != before
        opened = [await service.open(settings(f"{n}-0")) for n in range(2)]
        assert {session.instance_id for session in opened} == {worker.instance_id for worker in service.workers}
        assert [await turn(session) for session in opened] == [200, 200]


async def test_opening_waits_for_a_worker_when_all_are_being_started() -> None:
    launch = Workers()
    async with service_of(launch) as (service, _):
        before = service.workers[0].instance_id
        await launch.kill(service, 0)
        opening = asyncio.ensure_future(service.open(settings()))
        await asyncio.sleep(0.05)
        assert not opening.done()
        launch.may_start.set()
        assert (await opening).instance_id not in ("", before)


async def test_a_worker_that_dies_too_often_ends_the_run_and_says_which() -> None:
    launch = Workers()
    async with service_of(launch, workers=2, max_restarts=1) as (service, supervision):
        await launch.kill(service, 1)
        launch.may_start.set()
        await until(lambda: service.workers[1].url is not None)
        await launch.kill(service, 1)
        with pytest.raises(EngineError, match=r"worker 1 of .* was restarted 1 times in 3600 s, and now it ended"):
            await supervision


async def test_a_restart_that_is_long_ago_does_not_count() -> None:  # covers: C10
    launch = Workers()
    async with service_of(launch, max_restarts=1, restart_window=0.05) as (service, supervision):
        for _ in range(3):
            await asyncio.sleep(0.06)
            await launch.kill(service, 0)
            launch.may_start.set()
            await until(lambda: service.workers[0].url is not None)
        assert not supervision.done()


async def test_one_worker_that_cannot_start_is_an_error_of_the_start() -> None:
    launch = Workers(broken=True)
    with pytest.raises(EngineStartError, match=r"worker \d of the session server ended with status -9"):
        async with service_of(launch, workers=2):
            pass


async def test_turns_that_are_kept_are_told_by_routing_key_whichever_worker_has_them() -> None:
    # covers: C5
    begun: dict[str, int] = {}
    async with service_of(Workers(), ScriptedModel(says("68"), version=5), workers=2, began=begun.__setitem__) as (
        service,
        _,
    ):
        opened = [await service.open(settings(f"{n}-0")) for n in range(2)]
        await asyncio.gather(*map(turn, opened))
        await until(lambda: len(begun) == 2)
    assert begun == {"0-0": 5, "1-0": 5}


async def test_idle_sessions_expire_at_every_worker() -> None:
    async with service_of(Workers(timeout=2.0), workers=2) as (service, _):
        opened = [await service.open(settings(f"{n}-0")) for n in range(2)]
        await asyncio.sleep(4.0)  # two thirds of the time after which it is forgotten, too
        assert [(await service.collect(session)).ending for session in opened] == ["expired", "expired"]


async def test_keys_open_the_same_doors_at_every_worker() -> None:
    # covers: C13
    async with service_of(Workers(), workers=2) as (service, _), aiohttp.ClientSession() as http:
        for n in range(2):
            session = await service.open(settings(f"{n}-0"))
            agents = KEYS.sessions.agents.headers()
            for url, headers, expected in (
                (session.url, {}, 401),
                (session.url, agents, 200),
            ):
                async with http.get(url, headers=headers) as response:
                    assert response.status == expected
            async with http.post(f"{session.url}/collect", headers=agents) as response:
                assert response.status == 401
