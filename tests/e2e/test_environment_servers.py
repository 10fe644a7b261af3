"""Real servers of OpenEnv and NeMo Gym: they answer as recorded, and runs are trained with them.

Each has a virtual environment that is made here; OPENENV_PYTHON and NEMO_GYM_PYTHON name one that is there already.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import mean

import pytest

from miles_async.runtime.network.ports import HeldPort
from tests.fakes import environment_servers
from tests.fakes.environment_servers import Recording, ask_nemo_gym, ask_openenv, recording
from tests.integration.example_runs import assert_observations_carry_no_loss, trained_samples
from tests.integration.real_run import REVERSE, ROOT, RealRun, real_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

EXAMPLES = ROOT / "examples/environments"
TOOLS = Path(environment_servers.__file__).with_name("openenv_tools.py")
START_SECONDS = 600.0
CALCULATOR = ("examples/calculator_tool/run.sh",)
OTHER = ("--prompt-data", "none", "--eval-prompt-data", "none", "--eval-interval", "none", "--rm-type", "none")


def python_with(package: str, variable: str, folder: Path) -> str:
    """A Python that has the package, whose dependencies don't fit next to ours."""
    if (there := os.environ.get(variable)) is not None:
        return there
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True, timeout=1500)
    return python


@pytest.fixture(scope="module")
def openenv_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_with(recording("openenv_game")["package"], "OPENENV_PYTHON", tmp_path_factory.mktemp("openenv"))


@pytest.fixture(scope="module")
def gym_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_with(recording("nemo_gym")["package"], "NEMO_GYM_PYTHON", tmp_path_factory.mktemp("gym"))


class Server:
    """A server that can be killed and started again, at its port."""

    def __init__(self, folder: Path, words: Sequence[str], path: str) -> None:
        """``words``: its command, before the port. ``path``: what it answers when it is up."""
        with HeldPort("127.0.0.1") as free:
            self._port = str(free.number)
        self.url = f"http://127.0.0.1:{self._port}"
        self._folder, self._words, self._path = folder, words, path

    def start(self) -> None:
        log = self._folder / "server.log"
        with log.open("a") as output:
            self._process = subprocess.Popen([*self._words, self._port], cwd=self._folder, stdout=output, stderr=output)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(self.url + self._path, timeout=60).read()
                return
            except OSError:
                assert self._process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.5)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def running(folder: Path, source: Path, words: Sequence[str], path: str) -> Iterator[Server]:
    shutil.copy(source, folder)
    server = Server(folder, words, path)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def openenv_server(folder: Path, python: str, source: Path) -> AbstractContextManager[Server]:
    return running(folder, source, (python, "-m", "uvicorn", f"{source.stem}:app", "--port"), "/health")


def gym_server(folder: Path, python: str) -> AbstractContextManager[Server]:
    return running(folder, EXAMPLES / "nemo_gym_products.py", (python, "nemo_gym_products.py"), "/openapi.json")


def trained(
    run_dir: Path, command: tuple[str, ...], *flags: str, meanwhile: Callable[[RealRun], None] = lambda run: None
) -> RealRun:
    with real_run(run_dir, *OTHER, "--record", *flags, command=command) as run:
        meanwhile(run)
        assert run.wait(900) == 0, run.output
        run.assert_nothing_left()
    assert run.summary["balanced"]
    assert run.summary["groups"]["quarantined"] == run.summary["groups"]["failed"] == 0
    assert run.summary["logprob_diff"]["max"] < 1e-4
    for sample in trained_samples(run):
        assert_observations_carry_no_loss(sample)
    return run


def sent(known: Recording) -> list[list[object]]:
    return [[message for message, _ in session] for session in known["sessions"]]


def without_package(known: Recording) -> Recording:
    return {name: value for name, value in known.items() if name != "package"}


def test_openenv_is_learned_over_an_outage_and_answers_as_recorded(openenv_python: str, tmp_path: Path) -> None:
    # covers: R2, R3, C2, C6
    def outage(run: RealRun) -> None:
        run.wait_for_steps(5, 600)
        server.kill()
        time.sleep(10)
        server.start()

    known = recording("openenv_game")
    with openenv_server(tmp_path, openenv_python, EXAMPLES / "openenv_reverse.py") as server:
        assert asyncio.run(ask_openenv(server.url, sent(known))) == without_package(known)
        game = ("--environment", f"openenv:{server.url}", "--environment-eval-prompts", "16")
        limits = ("--num-rollout", "40", "--rollout-max-response-len", "40", "--max-tokens-per-turn", "7")
        run = trained(tmp_path / "run", REVERSE, *game, *limits, meanwhile=outage)
    samples = [*trained_samples(run)]
    assert {sample.metadata["turns"] for sample in samples} == {2}
    rewards = [step["reward/mean"] for step in run.steps]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1
    assert run.summary["eval_reward_first"] is not None
    assert run.steps[-1]["rollout/service_outage_seconds"] > 1


def test_tools_of_openenv_are_called_and_answer_as_recorded(openenv_python: str, tmp_path: Path) -> None:
    # covers: R2, R3, C2
    known = recording("openenv_tools")
    with openenv_server(tmp_path, openenv_python, TOOLS) as server:
        assert asyncio.run(ask_openenv(server.url, sent(known))) == without_package(known)
        own = ("--environment", f"openenv:{server.url}", "--environment-path", "none", "--rm-type", "exact_match")
        prompts = ("--prompt-data", "examples/calculator_tool/data/train.jsonl")
        run = trained(tmp_path / "run", CALCULATOR, "--eval-temperature", "none", "--num-rollout", "3", *own, *prompts)
    assert {1, 2} <= {sample.metadata["turns"] for sample in trained_samples(run)}
    assert all(0 < step["rollout/tool_calls/mean"] < 1 for step in run.steps)


def test_nemo_gym_is_learned_and_answers_as_recorded(gym_python: str, tmp_path: Path) -> None:
    # covers: R2, R3, C2
    known = recording("nemo_gym")
    (_, task), _ = known["sessions"][0][0]
    tasks = tmp_path / "tasks.jsonl"
    with tasks.open("w") as lines:
        for a in range(10, 100):
            for b in range(10, 100, 3):
                asked = {**task["responses_create_params"], "input": [{"role": "user", "content": f"{a}*{b}=?"}]}
                lines.write(json.dumps({"responses_create_params": asked, "answer": str(a * b)}) + "\n")
    with gym_server(tmp_path, gym_python) as server:
        answered = asyncio.run(ask_nemo_gym(server.url, sent(known)))
        assert {*answered["paths"]} >= {*known["paths"]}
        assert answered["sessions"] == known["sessions"]
        own = ("--environment", f"nemo-gym:{server.url}", "--environment-config", json.dumps({"data": str(tasks)}))
        sizes = ("--environment-path", "none", "--eval-temperature", "none", "--num-rollout", "8")
        run = trained(tmp_path / "run", CALCULATOR, *own, *sizes)
    samples = [*trained_samples(run)]
    assert {1, 2} <= {sample.metadata["turns"] for sample in samples}
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    assert run.summary["reward_last"] > run.summary["reward_first"] + 0.1
