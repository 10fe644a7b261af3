"""Environments of verifiers, with the package itself: `make verifiers` installs both versions.

# covers: R2, R3, C2, C6
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import psutil
import pytest

from miles_async.errors import ConfigurationError, RequestRejectedError, ServiceUnavailableError, TransientEngineError
from miles_async.integrations.generate_rows import rows_of
from miles_async.integrations.verifiers_episodes import HOST, VerifiersEpisodes, host_environment
from miles_async.rollout.agent import AgentGenerate
from miles_async.trajectory.taker import Limits
from miles_async.types import Attempt, GenerateRequest, Generation, JsonObject, Prompt, Sample
from miles_async.wiring.generation import SessionsOfRun
from tests.fakes.chat_formats import ORDINARY_TOKENS
from tests.fakes.keys import KEYS
from tests.fakes.session_agents import CHAT, END
from tests.integration.example_runs import assert_observations_carry_no_loss, trained_samples
from tests.integration.real_run import RealRun, real_run
from tests.unit.sessions.test_service import Workers, service_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

ROOT = Path(__file__).parents[2]
MODULES = Path(__file__).with_name("verifiers_modules")
NO_HARNESS = {"agent": {"harness": {"id": "null"}}}


def python_of(version: str) -> str:
    """The Python that has this version of verifiers."""
    python = ROOT / ".venv-verifiers" / version / "bin" / "python"
    if not python.exists():
        pytest.skip("`make verifiers` has not been run")
    return str(python)


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """All environments are importable in verifiers' Python."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'examples/environments'}:{MODULES}")


class Model:
    """Plays by what it reads, and remembers what it said in each session."""

    def __init__(self, plays: Callable[[str, int], str | list[int]]) -> None:
        """``plays``: (all the text so far, number of the turn) → what is said, as a text that ends or as tokens."""
        self._plays = plays
        self.said: defaultdict[str, list[int]] = defaultdict(list)
        self._turns: defaultdict[str, int] = defaultdict(int)

    async def generate(self, request: GenerateRequest) -> Generation:
        key = request.routing_key
        said = self._plays(CHAT.decode_all(request.input_ids.tolist()), self._turns[key])
        ids = [*CHAT.tokenize(said), *END] if isinstance(said, str) else said
        self._turns[key] += 1
        self.said[key] += ids
        return Generation(
            output_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            weight_versions=np.zeros(len(ids), np.int32),
            finish_reason="stop",
            engines=("engine-0",),
            prompt_tokens=len(request.input_ids),
        )


def uses_tool(text: str, turn: int, calls: int = 1) -> str:
    a, b = re.findall(r"(\d+)\*(\d+)=\?", text)[-1]
    if turn < calls:
        arguments = json.dumps({"expression": f"{a}*{b}"})
        return f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'
    return f"{int(a) * int(b)}"


def uses_tool_twice(text: str, turn: int) -> str:
    return uses_tool(text, turn, 2) + (" by call 2" if turn == 2 else "")


def reverses(text: str, turn: int) -> str:
    return re.findall(r"rev (\d+)", text)[-1][::-1]


def babbles(text: str, turn: int) -> list[int]:
    """Tokens that no tokenizer would make of their text, ended or cut."""
    drawn = random.Random(f"{text}{turn}")
    return [*(drawn.randrange(ORDINARY_TOKENS) for _ in range(drawn.randint(1, 12))), *drawn.choice([END, []])]


def prompts_of(version: str, name: str, config: JsonObject, count: int, held_out: int = 0) -> list[Prompt]:
    python = python_of(version)
    counts = [str(count), str(held_out)]
    rows = rows_of([python, str(HOST), "rows", name, json.dumps(config), *counts], name, host_environment(python))
    return [
        Prompt(
            prompt_id=f"p{n}",
            token_ids=(1,),
            text=row["prompt"][-1]["content"],
            messages=tuple(row["prompt"]),
            metadata=row["metadata"],
        )
        for n, row in enumerate(rows)
    ]


@asynccontextmanager
async def playing(
    version: str, name: str, config: JsonObject, model: Model, tmp_path: Path, *, timeout: float = 300.0
) -> AsyncIterator[tuple[Callable[[Sequence[Prompt]], Any], VerifiersEpisodes]]:
    """(plays episodes of all these prompts at once, and returns samples or errors; the process that plays them)."""
    episodes = VerifiersEpisodes(
        python_of(version),
        name,
        config,
        api_key=KEYS.sessions.agents,
        log_path=tmp_path / "verifiers.log",
        start_timeout=200.0,
    )
    await episodes.start()
    try:
        async with service_of(Workers(timeout=900.0), model, seconds=900.0) as (service, _):
            opened = SessionsOfRun(service, {"temperature": 1.0}, Limits(response=900, total=1500), False)
            generate = AgentGenerate(sessions=opened, run_agent=episodes, timeout=timeout)
            numbers = iter(range(10_000))

            async def play(prompts: Sequence[Prompt]) -> list[Sample | BaseException]:
                attempts = [Attempt(attempt_id=next(numbers), prompt=prompt, epoch=0) for prompt in prompts]
                tasks = [generate(None, attempt, 0) for attempt in attempts]  # type: ignore[arg-type]
                return await asyncio.gather(*tasks, return_exceptions=True)

            yield play, episodes
    finally:
        await episodes.stop()


def assert_trained_as_said(samples: Sequence[Sample | BaseException], model: Model, turns: int) -> None:
    trained = []
    for sample in samples:
        assert isinstance(sample, Sample), sample
        assert not sample.more_branches
        assert sample.metadata["agent_turns"] == sample.metadata["turns"] == turns
        assert sample.reward == 1.0
        trained.append(sample.tokens[sample.loss_mask == 1].tolist())
    assert sorted(trained) == sorted(model.said.values())


@pytest.mark.parametrize(
    ("version", "name", "config", "plays", "turns"),
    [
        ("0.4", "tools_of_tasks", NO_HARNESS, uses_tool, 2),
        ("0.4", "rounds_of_tasks", NO_HARNESS, reverses, 2),
        ("0.3", "verifiers_products", {}, uses_tool, 2),
        ("0.3", "tools_of_classic", {}, uses_tool_twice, 3),
        ("0.3", "rounds_of_classic", {}, reverses, 2),
    ],
)
async def test_what_the_model_said_is_what_is_trained(
    version: str, name: str, config: JsonObject, plays: Callable[[str, int], str], turns: int, tmp_path: Path
) -> None:
    model, prompts = Model(plays), prompts_of(version, name, config, 4, 2)
    assert len({prompt.text for prompt in prompts}) == 6
    async with playing(version, name, config, model, tmp_path) as (play, _):
        assert_trained_as_said(await play(prompts), model, turns)


@pytest.mark.parametrize(
    ("version", "name", "config", "episodes"),
    [("0.4", "rounds_of_tasks", NO_HARNESS, 8), ("0.3", "rounds_of_classic", {}, 60)],  # 0.4 starts a Python for each
)
async def test_whatever_the_model_says_is_what_is_trained(
    version: str, name: str, config: JsonObject, episodes: int, tmp_path: Path
) -> None:
    model, prompts = Model(babbles), prompts_of(version, name, config, episodes)
    async with playing(version, name, config, model, tmp_path) as (play, _):
        samples = await play(prompts)
    trained = [sample.tokens[sample.loss_mask == 1].tolist() for sample in samples]
    assert sorted(trained) == sorted(model.said.values())
    assert not any(sample.more_branches for sample in samples)
    assert {sample.metadata["turns"] for sample in samples} == {2}


async def test_200_episodes_at_once_are_played_once_and_closed(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    config = {"counts": str(counts), "count": 200, "fails": 20, "hangs": 10}
    prompts, model = prompts_of("0.3", "rounds_of_classic", config, 200), Model(reverses)
    assert len(prompts) == 200
    async with playing("0.3", "rounds_of_classic", config, model, tmp_path, timeout=60.0) as (play, episodes):
        begun = in_use(episodes)
        results = await play(prompts)
        failed, hung, played = results[:20], results[20:30], results[30:]
        assert all(isinstance(each, RequestRejectedError) and "that went wrong" in str(each) for each in failed)
        assert all(isinstance(each, RequestRejectedError) and "--agent-timeout" in str(each) for each in hung)
        kept = {f"{n}-0" for n in range(30, 200)}
        model.said = defaultdict(list, {key: ids for key, ids in model.said.items() if key in kept})
        assert_trained_as_said(played, model, 2)
        memory = in_use(episodes)[2]
        for _ in range(2):
            model.said.clear()
            await play(prompts[30:])
            assert len(model.said) == 170
        files, threads, _ = (now - then for now, then in zip(in_use(episodes), begun, strict=True))
        assert files <= 110  # 100 connections stay open for the next episodes
        assert threads <= 40
        assert in_use(episodes)[2] - memory < 64 << 20
    told = json.loads(counts.read_text())
    assert sorted(told["opened"]) == sorted(told["closed"]) == sorted([*range(200), *range(30, 200), *range(30, 200)])


async def test_episodes_of_tasks_leave_no_connections(tmp_path: Path) -> None:
    prompts, model = prompts_of("0.4", "rounds_of_tasks", NO_HARNESS, 8), Model(reverses)
    async with playing("0.4", "rounds_of_tasks", NO_HARNESS, model, tmp_path) as (play, episodes):
        assert_trained_as_said(await play(prompts), model, 2)
        before = in_use(episodes)
        for _ in range(2):
            await play(prompts)
        files, threads, _ = (now - then for now, then in zip(in_use(episodes), before, strict=True))
        assert files <= 4
        assert threads <= 8


def in_use(episodes: VerifiersEpisodes) -> tuple[int, int, int]:
    """Files, threads and bytes of the process that plays."""
    assert episodes._process is not None
    (host,) = psutil.Process(episodes._process.pid).children()
    return host.num_fds(), host.num_threads(), host.memory_info().rss


async def test_a_reward_that_raises_is_no_reward_of_zero(tmp_path: Path) -> None:
    config = {"scores": "unscored"}
    prompts = prompts_of("0.3", "rounds_of_classic", config, 1)
    async with playing("0.3", "rounds_of_classic", config, Model(reverses), tmp_path) as (play, _):
        (error,) = await play(prompts)
    assert isinstance(error, ServiceUnavailableError)
    assert "the judge is down" in str(error)


async def test_rewards_of_a_group_are_those_of_its_rubric(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    config = {"scores": "reversed_twice+first_of_all", "counts": str(counts)}
    (asked,) = prompts_of("0.3", "rounds_of_classic", config, 1)
    async with playing("0.3", "rounds_of_classic", config, Model(reverses), tmp_path) as (play, episodes):
        samples, others = await play([asked] * 4), await play([asked] * 2)
        assert [sample.reward for sample in samples] == [None] * 4
        assert [sample.metadata["turns"] for sample in samples] == [2] * 4
        assert await episodes.reward_group(asked, samples) == [2.0, 1.75, 1.5, 1.25]
        with pytest.raises(TransientEngineError, match="a rollout of the group is not kept any more"):
            await episodes.reward_group(asked, samples)
        assert episodes._process is not None
        for host in psutil.Process(episodes._process.pid).children():
            host.kill()
        with pytest.raises((TransientEngineError, ConnectionError)):
            await episodes.reward_group(asked, others)
        (sample,) = await play([asked])
        assert isinstance(sample, Sample)
    told = json.loads(counts.read_text())  # of the second process, whose only rollout was never rewarded
    assert told == {"opened": [0], "closed": [0]}


async def test_rewards_of_a_group_in_an_env_group_are_those_of_its_environment(tmp_path: Path) -> None:
    config = {"scores": "reversed_twice/first_of_all", "groups": 1, "count": 1}
    one_by_one, as_group = prompts_of("0.3", "rounds_of_classic", config, 2)
    async with playing("0.3", "rounds_of_classic", config, Model(reverses), tmp_path) as (play, episodes):
        for asked, rewards in ((one_by_one, [1.0] * 3), (as_group, [1.0, 0.75, 0.5])):
            assert await episodes.reward_group(asked, await play([asked] * 3)) == rewards


async def test_a_group_whose_reward_failed_can_be_rewarded_again(tmp_path: Path) -> None:
    # covers: C6
    config = {"scores": "judged"}
    (asked,) = prompts_of("0.3", "rounds_of_classic", config, 1)
    async with playing("0.3", "rounds_of_classic", config, Model(reverses), tmp_path) as (play, episodes):
        samples = await play([asked] * 2)
        with pytest.raises(ConnectionError, match="the judge is down"):
            await episodes.reward_group(asked, samples)
        assert await episodes.reward_group(asked, samples) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("version", "name", "config", "found"),
    [
        ("0.4", "rounds_of_tasks", {"id": "user-sim"}, "expected one agent .* found assistant, user: give"),
        ("0.4", "rounds_of_tasks", {"id": "best-of-n", "n": 2}, "best-of-n runs the policy 2 times per episode"),
        ("0.3", "rounds_of_classic", {"groups": 2}, "is an EnvGroup of EnvGroups"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(version: str, name: str, config: JsonObject, found: str) -> None:
    with pytest.raises(ConfigurationError, match=found):
        prompts_of(version, name, config, 1)


async def test_an_environment_that_runs_the_policy_several_times_is_refused_in_its_episodes(tmp_path: Path) -> None:
    config = {**NO_HARNESS, "runs": 2}
    prompts = prompts_of("0.4", "rounds_of_tasks", config, 1)
    async with playing("0.4", "rounds_of_tasks", config, Model(reverses), tmp_path) as (play, _):
        (error,) = await play(prompts)
    assert isinstance(error, RequestRejectedError)
    assert "2 runs of agent in one episode: a session is one run of the policy" in str(error)


def trained(tmp_path: Path, version: str, name: str, config: JsonObject, *sizes: str) -> RealRun:
    """A run with the model of the examples' tools and real engines."""
    tasks = ("--environment", f"verifiers:{name}", "--environment-python", python_of(version))
    flags = ("--environment-config", json.dumps(config), "--environment-prompts", "2000")
    other = ("--environment-path", "none", "--max-turns", "16", "--prompt-data", "none", "--eval-prompt-data", "none")
    evaluation = ("--eval-interval", "none", "--eval-temperature", "none", "--record")
    command = ("examples/calculator_tool/run.sh",)
    with real_run(tmp_path / "run", *tasks, *flags, *other, *evaluation, *sizes, command=command) as run:
        assert run.wait(900) == 0, run.output
        run.assert_nothing_left()
    assert run.summary["balanced"]
    assert run.summary["groups"]["failed"] == 0
    assert run.summary["logprob_diff"]["max"] < 1e-4
    return run


def test_a_classic_tool_environment_is_learned(tmp_path: Path) -> None:
    run = trained(tmp_path, "0.3", "verifiers_products", {}, "--num-rollout", "12")
    samples = [*trained_samples(run)]
    assert {1, 2} <= {sample.metadata["turns"] for sample in samples}
    for sample in samples:
        assert_observations_carry_no_loss(sample)
        assert sample.reward in (0.0, 1.0)
    rewards = [step["reward/mean"] for step in run.steps]
    assert mean(rewards[-3:]) > mean(rewards[:2]) + 0.2  # 0.5 when it was written


@pytest.mark.parametrize("name", ["verifiers_sums", "tools_of_tasks", "rounds_of_tasks"])
def test_tasks_are_played_and_trained(name: str, tmp_path: Path) -> None:
    # Few at a time: each episode starts Pythons of its own, and verifiers waits 180 s for the one of a tool.
    sizes = (
        "--num-rollout",
        "2",
        "--rollout-batch-size",
        "4",
        "--n-samples-per-prompt",
        "2",
        "--max-rollout-lead",
        "1",
    )
    run = trained(tmp_path, "0.4", name, NO_HARNESS, *sizes)
    samples = [*trained_samples(run)]
    assert len(samples) == 2 * 4 * 2
    assert max(sample.metadata["turns"] for sample in samples) == (1 if name == "verifiers_sums" else 2)
    for sample in samples:
        assert_observations_carry_no_loss(sample)
        assert 0.0 <= sample.reward <= 1.0


def test_a_classic_environment_that_rewards_groups_is_trained(tmp_path: Path) -> None:
    sizes = ("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4")
    run = trained(tmp_path, "0.3", "rounds_of_classic", {"scores": "first_of_all"}, *sizes)
    samples = [*trained_samples(run)]
    assert len(samples) == 2 * 4 * 4
    for sample in samples:
        assert_observations_carry_no_loss(sample)
    groups = [samples[first : first + 4] for first in range(0, len(samples), 4)]
    assert [[sample.reward for sample in group] for group in groups] == [[1.0, 0.75, 0.5, 0.25]] * 8
