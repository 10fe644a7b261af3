"""The session server's own process: agents in it, engines behind the rollout process, and what its death costs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import psutil
import pytest

from miles_async.errors import EngineStartError, RequestRejectedError, TransientEngineError
from miles_async.runtime.processes.child_process import ChildProcess
from miles_async.sessions.service import SessionService
from miles_async.sessions.session import SessionSettings
from miles_async.trajectory.taker import Limits
from miles_async.types import OpenSession
from miles_async.wiring.session_process import ServerSettings
from tests.fakes.keys import KEYS
from tests.fakes.scripted_model import ScriptedModel

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "assets" / "reverse" / "model"
QUESTION = {"role": "user", "content": "rev 12"}
SETTINGS = SessionSettings(routing_key="7-1", sampling={"temperature": 1.0}, limits=Limits(response=50, total=100))
ANSWER = [14, 13, 2]  # "21" and <eos>


@asynccontextmanager
async def service_of(model: ScriptedModel, log_dir: Path, **options: object) -> AsyncIterator[SessionService]:
    settings = ServerSettings(
        hf_checkpoint=str(MODEL), host="127.0.0.1", session_timeout=600.0, tool_call_parser=None, reasoning_parser=None
    )
    children: list[ChildProcess] = []

    def launch(socket: Path, worker: int, starts: int) -> ChildProcess:
        path, environment = log_dir / f"sessions-{worker}.{starts}.log", KEYS.sessions.environment()
        children.append(ChildProcess("s", settings.command(socket), log_path=path, environment=environment))
        return children[-1]

    service = SessionService(model, launch, keys=KEYS.sessions, **options)
    await service.start()
    supervision = asyncio.ensure_future(service.supervise())
    try:
        yield service
    finally:
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)
        await service.stop()
    assert not [child.pid for child in children if psutil.pid_exists(child.pid)]


async def chat(session: OpenSession) -> str:
    async with openai.AsyncOpenAI(
        base_url=session.base_url, api_key=KEYS.sessions.agents.reveal(), max_retries=0
    ) as client:
        answer = await client.chat.completions.create(model="policy", messages=[QUESTION])
        return answer.choices[0].message.content or ""


def server_pid(log_dir: Path, starts: int, worker: int = 0) -> int:
    path = str(log_dir / f"sessions-{worker}.{starts}.log")
    (process,) = [
        process
        for process in psutil.Process().children()
        if any(file.path == path for file in process.open_files())
        or path in str(os.readlink(f"/proc/{process.pid}/fd/1"))
    ]
    return process.pid


async def test_a_session_samples_through_the_rollout_process_and_tells_which_version_began_it(tmp_path: Path) -> None:
    # covers: M13, A7, C5
    begun: dict[str, int] = {}
    model = ScriptedModel(lambda call, input_ids: ANSWER, version=5)
    async with service_of(model, tmp_path, began=begun.__setitem__) as service:
        session = await service.open(SETTINGS)
        assert await chat(session) == "21"
        async with asyncio.timeout(60):
            while not begun:  # noqa: ASYNC110, said with the next sign of life
                await asyncio.sleep(0.05)
        assert begun == {SETTINGS.routing_key: 5}
        collected = await service.collect(session)
        with pytest.raises(TransientEngineError, match="session lost: HTTP 404"):
            await service.collect(session)

        model.script = lambda call, input_ids: RequestRejectedError("HTTP 413: too long for the engine")
        session = await service.open(SETTINGS)
        with pytest.raises(openai.APIStatusError, match="too long for the engine") as caught:
            await chat(session)
        assert caught.value.status_code == 413
        model.script = lambda call, input_ids: TransientEngineError("engines are gone")
        with pytest.raises(openai.InternalServerError, match="engines are gone"):
            await chat(session)
        assert (await service.collect(session)).failure == "engines are gone"
    sample = collected.sample
    assert sample.tokens[sample.loss_mask == 1].tolist() == ANSWER
    assert set(sample.weight_versions[sample.loss_mask == 1]) == {5}
    assert model.routing_keys[0] == "7-1"


async def test_a_worker_that_dies_or_hangs_costs_its_own_sessions_and_takes_others_when_it_is_back(
    tmp_path: Path,
) -> None:
    # covers: M13
    model = ScriptedModel(lambda call, input_ids: ANSWER)
    async with service_of(model, tmp_path, workers=2) as service:
        for worker, number in enumerate([signal.SIGSTOP, signal.SIGKILL]):
            opened = [await service.open(SETTINGS) for _ in range(4)]
            before = service.workers[worker].instance_id
            lost = [session for session in opened if session.instance_id == before]
            assert len(lost) == 2
            assert await chat(lost[0]) == "21"
            os.kill(server_pid(tmp_path, 0, worker), number)
            if number == signal.SIGSTOP:
                service.workers[worker]._silence_timeout = 2.0  # of this one alone: the others may be slow
            while service.workers[worker].instance_id == before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            service.workers[worker]._silence_timeout = 30.0
            for session in opened:
                if session in lost:
                    with pytest.raises(TransientEngineError, match=r"does not answer|session lost"):
                        await service.collect(session)
                else:
                    assert await chat(session) == "21"
                    assert (await service.collect(session)).sample is not None
        again = [await service.open(SETTINGS) for _ in range(2)]
        assert {session.instance_id for session in again} == {each.instance_id for each in service.workers}
        assert [await chat(session) for session in again] == ["21", "21"]


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def failing() -> None:
        settings = ServerSettings(
            hf_checkpoint="/nowhere", host="127.0.0.1", session_timeout=1, tool_call_parser=None, reasoning_parser=None
        )
        environment = KEYS.sessions.environment()
        service = SessionService(
            ScriptedModel(lambda call, input_ids: ANSWER),
            lambda socket, worker, starts: ChildProcess(
                "s", settings.command(socket), log_path=tmp_path / "s.log", environment=environment
            ),
            keys=KEYS.sessions,
        )
        try:
            await service.start()
        finally:
            await service.stop()

    with pytest.raises(EngineStartError, match="--hf-checkpoint /nowhere: there is no such directory"):
        await failing()
