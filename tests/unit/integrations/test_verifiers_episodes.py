"""The process that plays tasks of verifiers: a stand-in of the package, and faults of the process.

tests/e2e/test_verifiers.py plays with the package itself.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from msgspec import structs

from miles_async.errors import ConfigurationError, RequestRejectedError, TransientEngineError
from miles_async.integrations import verifiers_episodes, verifiers_host
from miles_async.integrations.generate_rows import rows_of
from miles_async.integrations.verifiers_episodes import HOST, VerifiersEpisodes
from miles_async.types import Prompt, Sample
from tests.fakes.keys import KEYS
from tests.property.builders import make_sample
from tests.waiting import until

PLAYS = '''
"""Answers as verifiers_host.py does; its tasks say what happens."""
import json, os, subprocess, sys, time

if "broken" in sys.argv[3]:
    sys.exit("No module named 'verifiers'")
if "slow" in sys.argv[3] and not os.path.exists("slow"):  # the first time
    open("slow", "w").close()
    time.sleep(600)
kept = set()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    number, task = message["id"], message.get("task")
    if "rollouts" in message:
        left = [rollout for rollout in message["rollouts"] if rollout not in kept]
        told = {"error": "not kept", "lost": True} if left else {"rewards": [*range(len(message["rollouts"]))]}
        print(json.dumps({"id": number, **told}), flush=True)
        continue
    if task is None:
        print(f"cancelled {number}", file=sys.stderr, flush=True)
        continue
    does = task["does"]
    if does == "wait":
        continue
    if does == "garbage":
        print("hello", flush=True)
        continue
    if does == "die":
        sys.exit("out of memory")
    if does == "leave":
        subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    told = {"turns": 2, "reward": task.get("reward", 1.0)}
    if does == "group":
        kept.add(f"r{number}")
        told = {"turns": 3, "rollout": f"r{number}"}
    if does == "fail":
        told = {"error": "TaskError: no such file", "down": task["down"]}
    if does == "environment":
        told = {"turns": 1, "reward": float(os.environ["OPENAI_API_KEY"] == task["key"])}
    print(json.dumps({"id": number, **told}), flush=True)
'''


@pytest.fixture
async def episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VerifiersEpisodes]:
    made = stand_in(tmp_path, monkeypatch)
    await made.start()
    yield made
    await made.stop()


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **config: object) -> VerifiersEpisodes:
    host = tmp_path / "host.py"
    host.write_text(PLAYS)
    monkeypatch.setattr(verifiers_episodes, "HOST", host)
    return episodes_of(config, tmp_path / "logs" / "verifiers.log")


def episodes_of(config: dict[str, object], log: Path) -> VerifiersEpisodes:
    key = KEYS.sessions.agents
    return VerifiersEpisodes(sys.executable, "my_tasks", config, api_key=key, log_path=log, start_timeout=60.0)


def prompt(does: str, **task: object) -> Prompt:
    return Prompt(prompt_id="p", token_ids=(1,), text="?", metadata={"task": {"does": does, **task}})


async def test_episodes_of_one_process_return_turns_and_reward(episodes: VerifiersEpisodes) -> None:
    asked = [episodes("http://127.0.0.1:1/v1", prompt("play", reward=reward)) for reward in (0.0, 0.5, 1.0)]
    assert await asyncio.gather(*asked) == [(2, 0.0), (2, 0.5), (2, 1.0)]
    key = KEYS.sessions.agents.reveal()
    assert await episodes("http://127.0.0.1:1/v1", prompt("environment", key=key)) == (1, 1.0)


def played(turns: object, reward: float | None) -> Sample:
    return structs.replace(make_sample([0]), reward=reward, metadata={"agent_turns": turns})


async def test_episodes_of_a_group_are_rewarded_together(episodes: VerifiersEpisodes) -> None:
    asked = prompt("group")
    samples = [played(*await episodes("http://127.0.0.1:1/v1", asked)) for _ in range(3)]
    assert [(sample.metadata["agent_turns"]["turns"], sample.reward) for sample in samples] == [(3, None)] * 3
    assert await episodes.reward_group(asked, samples) == [0.0, 1.0, 2.0]
    single = [played(*await episodes("", prompt("play", reward=reward))) for reward in (0.25, 0.75)]
    assert await episodes.reward_group(asked, single) == [0.25, 0.75]


async def test_episodes_of_a_process_that_ended_are_lost_to_their_group(episodes: VerifiersEpisodes) -> None:
    # covers: C6
    samples = [played(*await episodes("", prompt("group")))]
    with pytest.raises(ConnectionError):
        await episodes("", prompt("die"))
    with pytest.raises(TransientEngineError, match="verifiers: not kept"):
        await episodes.reward_group(prompt("group"), samples)


async def test_what_verifiers_reports_is_the_attempts_own_failure(episodes: VerifiersEpisodes) -> None:
    with pytest.raises(RequestRejectedError, match="verifiers: TaskError: no such file"):
        await episodes("", prompt("fail", down=False))
    with pytest.raises(RequestRejectedError, match="a task of verifiers in the prompt's metadata"):
        await episodes("", Prompt(prompt_id="p", token_ids=(1,), text="?"))


async def test_a_service_that_verifiers_reports_down_is_waited_for(episodes: VerifiersEpisodes) -> None:
    # covers: C6
    with pytest.raises(ConnectionError, match="verifiers: TaskError: no such file"):
        await episodes("", prompt("fail", down=True))


async def test_a_process_that_dies_is_a_service_that_is_down_and_starts_again(episodes: VerifiersEpisodes) -> None:
    # covers: C6
    waiting = asyncio.create_task(episodes("", prompt("wait")))
    await asyncio.sleep(0)
    for task in (episodes("", prompt("die")), waiting):
        with pytest.raises(ConnectionError, match="the process of verifiers ended: out of memory"):
            await asyncio.wait_for(task, 20)
    assert await episodes("", prompt("play")) == (2, 1.0)


async def test_a_line_that_is_no_answer_ends_the_process_and_another_one_plays_on(episodes: VerifiersEpisodes) -> None:
    # covers: C6
    waiting = asyncio.create_task(episodes("", prompt("wait")))
    await asyncio.sleep(0)
    for task in (episodes("", prompt("garbage")), waiting):
        with pytest.raises(ConnectionError, match="the process of verifiers wrote a line that is not an answer"):
            await asyncio.wait_for(task, 20)
    assert await asyncio.wait_for(episodes("", prompt("play")), 20) == (2, 1.0)


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = stand_in(tmp_path, monkeypatch, slow=True)
    before = psutil.Process().children()  # of tests before
    first = asyncio.create_task(made("", prompt("play")))
    await until(Path("slow").exists)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert [*{*psutil.Process().children()} - {*before}] == []
    assert await asyncio.wait_for(made("", prompt("play")), 20) == (2, 1.0)
    await made.stop()


async def test_an_answer_that_cannot_be_written_costs_its_own_episode() -> None:
    rewards = {"1": float("nan"), "2": np.float32(0.5), "3": 1.0, "4": ConnectionRefusedError("no model")}

    class Loaded:
        @asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            yield

        async def play(self, task: str, base_url: str) -> dict[str, object]:
            if isinstance(found := rewards[task], Exception):
                raise found
            return {"turns": 2, "reward": found}

    read, write = os.pipe()
    answers = io.StringIO()
    playing = asyncio.ensure_future(verifiers_host.play(Loaded(), os.fdopen(read, "rb"), answers))
    asked = [json.dumps({"id": int(task), "task": task, "base_url": ""}) for task in rewards]
    os.write(write, "".join(f"{line}\n" for line in asked).encode())
    await until(lambda: answers.getvalue().count("\n") == 1 + len(rewards))
    os.close(write)
    await playing
    ready, *told = map(json.loads, answers.getvalue().splitlines())
    assert ready == {"ready": True}
    by_id = {each.pop("id"): each for each in told}
    assert "ValueError" in by_id[1]["error"]
    assert not by_id[1]["down"]
    assert by_id[2] == {"turns": 2, "reward": 0.5}
    assert by_id[3] == {"turns": 2, "reward": 1.0}
    assert by_id[4] == {"error": "ConnectionRefusedError: no model", "down": True}


PACKAGE = '''
"""Stands in for verifiers: its episodes start processes that read standard input and write to standard output."""
import contextlib, subprocess, types

class ModelContext: pass
BestOfNEnvConfig = EvalClientConfig = SamplingConfig = InterceptionServer = ModelContext
resolve_client = build_async_httpx = None

class Taskset:
    @staticmethod
    def task_type():
        subprocess.run(["cat"])
        subprocess.run(["echo", "stray"])
        raise ValueError("that was all")

def load_taskset(config):
    subprocess.run(["echo", "stray"])
    return []

def load_environment(config):
    return types.SimpleNamespace(taskset=Taskset(), serving=contextlib.AsyncExitStack)

def agent_config_fields(config):
    return {name: types.SimpleNamespace(client=None, runtime=types.SimpleNamespace(type="docker")) for name in config}

def resolve_env_config(given):
    return given.get("agents", ["agent"])
'''


def stand_in_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for module in (
        *("clients.eval", "clients", "configs.agent", "configs.client", "envs.best_of_n"),
        *("interception.server", "types", "utils.loaders"),
    ):
        path = tmp_path / "verifiers" / "v1" / f"{module.replace('.', '/')}.py"
        path = path.with_suffix("") / "__init__.py" if module == "clients" else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PACKAGE)
    metadata = tmp_path / f"verifiers-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def test_pipes_of_the_host_are_not_those_of_the_processes_that_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_package(tmp_path, monkeypatch, "0.4.9")
    log = tmp_path / "verifiers.log"
    made = episodes_of({}, log)
    for _ in range(2):
        with pytest.raises(RequestRejectedError, match="verifiers: ValueError: that was all"):
            await asyncio.wait_for(made("", prompt("play")), 60)
    await made.stop()
    assert log.read_text() == "stray\nstray\n"


EXPECTED = r"--environment-python: expected verifiers 0\.4 or 0\.3, found"
INSTALL = rf"{re.escape(sys.executable)} -m pip install 'verifiers>=0\.4,<0\.5' uv"


@pytest.mark.parametrize(
    ("version", "agents", "found"),
    [
        ("0.4.9", ["solver", "judge"], "expected one agent without a client of its own, .* found solver, judge: give"),
        ("0.1.14", ["agent"], rf"{EXPECTED} 0\.1\.14: {INSTALL}"),
        (None, ["agent"], rf"{EXPECTED} none: {INSTALL}"),
    ],
)
async def test_what_cannot_be_trained_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, agents: list[str], found: str
) -> None:
    if version is not None:
        stand_in_package(tmp_path, monkeypatch, version)
    made = episodes_of({"agents": agents}, tmp_path / "verifiers.log")
    with pytest.raises(ConfigurationError, match=f"did not come up: {found}"):
        await made.start()
    rows = [sys.executable, str(HOST), "rows", "my_tasks", json.dumps({"agents": agents}), "4", "0"]
    with pytest.raises(ConfigurationError, match=f"--environment verifiers:my_tasks: {found}"):
        rows_of(rows, "--environment verifiers:my_tasks", dict(os.environ))


async def test_an_episode_that_is_given_up_is_cancelled_there(episodes: VerifiersEpisodes, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(episodes("", prompt("wait")), 0.2)
    assert await episodes("", prompt("play")) == (2, 1.0)  # after the message
    assert "cancelled 0" in (tmp_path / "logs" / "verifiers.log").read_text()
    assert episodes._waiting == {}


async def test_nothing_is_left_of_the_process(episodes: VerifiersEpisodes) -> None:
    await episodes("", prompt("leave"))
    assert episodes._process is not None
    wrapper = psutil.Process(episodes._process.pid)
    started = wrapper.children(recursive=True)
    assert len(started) == 2
    await episodes.stop()
    assert not [process for process in started if process.is_running()]


async def test_a_process_that_does_not_come_up_is_refused_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stand_in(tmp_path, monkeypatch, broken=True)
    with pytest.raises(ConfigurationError, match="did not come up: No module named 'verifiers'"):
        await made.start()
    await made.stop()


async def test_it_ends_with_the_process_that_started_it(episodes: VerifiersEpisodes) -> None:
    assert episodes._process is not None
    os.kill(episodes._process.pid, signal.SIGTERM)
    assert await asyncio.wait_for(episodes._process.wait(), 20) == 128 + signal.SIGTERM
