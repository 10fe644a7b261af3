"""The process that plays tasks of verifiers: a stand-in of the package, and faults of the process.

tests/e2e/test_verifiers.py plays with the package itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from miles_async.errors import ConfigurationError, RequestRejectedError
from miles_async.integrations import verifiers_episodes
from miles_async.integrations.verifiers_episodes import VerifiersEpisodes
from miles_async.types import Prompt
from tests.fakes.keys import KEYS

HOST = '''
"""Answers as verifiers_host.py does; its tasks say what happens."""
import json, os, subprocess, sys, time

if "broken" in sys.argv[2]:
    sys.exit("No module named 'verifiers'")
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    number, task = message["id"], message.get("task")
    if task is None:
        print(f"cancelled {number}", file=sys.stderr, flush=True)
        continue
    does = task["does"]
    if does == "wait":
        continue
    if does == "die":
        sys.exit("out of memory")
    if does == "leave":
        subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    told = {"error": "TaskError: no such file"} if does == "fail" else {"turns": 2, "reward": task.get("reward", 1.0)}
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
    host.write_text(HOST)
    monkeypatch.setattr(verifiers_episodes, "HOST", host)
    return VerifiersEpisodes(
        sys.executable,
        config,
        api_key=KEYS.sessions.agents,
        log_path=tmp_path / "logs" / "verifiers.log",
        start_timeout=60.0,
    )


def prompt(does: str, **task: object) -> Prompt:
    return Prompt(prompt_id="p", token_ids=(1,), text="?", metadata={"task": {"does": does, **task}})


async def test_episodes_of_one_process_return_turns_and_reward(episodes: VerifiersEpisodes) -> None:
    asked = [episodes("http://127.0.0.1:1/v1", prompt("play", reward=reward)) for reward in (0.0, 0.5, 1.0)]
    assert await asyncio.gather(*asked) == [(2, 0.0), (2, 0.5), (2, 1.0)]
    key = KEYS.sessions.agents.reveal()
    assert await episodes("http://127.0.0.1:1/v1", prompt("environment", key=key)) == (1, 1.0)


async def test_what_verifiers_reports_is_the_attempts_own_failure(episodes: VerifiersEpisodes) -> None:
    with pytest.raises(RequestRejectedError, match="verifiers: TaskError: no such file"):
        await episodes("", prompt("fail"))
    with pytest.raises(RequestRejectedError, match="a task of verifiers in the prompt's metadata"):
        await episodes("", Prompt(prompt_id="p", token_ids=(1,), text="?"))


async def test_a_process_that_dies_is_a_service_that_is_down_and_starts_again(episodes: VerifiersEpisodes) -> None:
    # covers: C6
    waiting = asyncio.create_task(episodes("", prompt("wait")))
    await asyncio.sleep(0)
    for task in (episodes("", prompt("die")), waiting):
        with pytest.raises(ConnectionError, match="the process of verifiers ended: out of memory"):
            await asyncio.wait_for(task, 20)
    assert await episodes("", prompt("play")) == (2, 1.0)


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
