"""Prompts that ``--environment`` generates: the same flags give the same file, and say how it is read."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.parser import assemble
from miles_async.errors import ConfigurationError
from miles_async.prompts.rows import open_prompts
from miles_async.rewards.row_check import RewardOfRow
from miles_async.runtime import packages
from miles_async.wiring.environments import check_environments, run_environments
from miles_async.wiring.generated_prompts import with_generated_prompts
from tests.extras import needs
from tests.fakes.environment_servers import openenv, recording, serving

SUMS = {"environment": "reasoning_gym:chain_sum", "environment_prompts": 5}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "environment-prompts"


def generated(**flags: object) -> Arguments:
    return with_generated_prompts(assemble({**SUMS, **flags}, {}))


def rows(paths: Sequence[str] | None) -> list[dict[str, Any]]:
    assert paths is not None
    (path,) = map(Path, paths)
    return [json.loads(line) for line in path.read_text().splitlines()]


@needs("reasoning_gym")
def test_a_task_of_reasoning_gym_becomes_prompts_with_its_reward(folder: Path) -> None:
    arguments = generated()
    prompts = open_prompts(arguments.data, RewardOfRow(arguments.rewards))
    assert len(prompts) == 5
    assert arguments.rewards.rm_type == "reasoning_gym"
    (path,) = map(Path, arguments.data.prompt_data or ())
    assert path.parent.parent == folder
    assert path.name == "reasoning_gym-chain_sum.jsonl"
    (first, *_) = rows(arguments.data.prompt_data)
    assert first["label"] == str(eval(first["metadata"]["expression"]))
    assert generated().data.prompt_data == arguments.data.prompt_data
    seed, config = generated(rollout_seed=7), generated(environment_config='{"max_terms": 2}')
    others = {seed.data.prompt_data, config.data.prompt_data}
    assert len({arguments.data.prompt_data, *others}) == 3


@needs("reasoning_gym")
def test_prompts_for_evaluation_are_others(folder: Path) -> None:
    arguments = generated(environment_eval_prompts=3)
    assert arguments.evaluation.eval_prompt_data is not None
    name, path = arguments.evaluation.eval_prompt_data
    held_out, trained = rows([path]), rows(arguments.data.prompt_data)
    assert name == "environment"
    assert (len(held_out), len(trained)) == (3, 5)
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in trained}
    assert trained == rows(generated().data.prompt_data)


@needs("reasoning_gym")
def test_a_task_without_one_answer_has_no_labels() -> None:
    arguments = generated(environment="reasoning_gym:rush_hour", environment_prompts=1)
    assert arguments.data.label_key is None
    open_prompts(arguments.data, RewardOfRow(arguments.rewards))


@needs("reasoning_gym")
def test_ones_own_prompts_and_reward_stay() -> None:
    own = generated(prompt_data=("own.jsonl",))
    assert own.data.prompt_data == ("own.jsonl",)
    assert generated(rm_type="math").rewards.rm_type == "math"
    assert with_generated_prompts(Arguments()) == Arguments()


@needs("reasoning_gym")
@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"environment": "gymnasium"}, "expected KIND:NAME with one of the kinds gymnasium, reasoning_gym"),
        ({"environment": "reasoning-gym:a"}, "did you mean reasoning_gym?"),
        ({"environment_config": "max_terms=2"}, "--environment-config max_terms=2: expected a JSON object"),
        ({"environment_config": "[2]"}, "expected a JSON object, found list"),
        ({"environment_config": '{"max_terms": 0}'}, "--environment reasoning_gym:chain_sum: "),
        ({"environment": "reasoning_gym:no_such_task"}, "--environment reasoning_gym:no_such_task: "),
        ({"environment": "reasoning_gym:rearc"}, "its own answer is scored differently when"),
        ({"eval_prompt_data": ("a.jsonl",)}, "give --environment-eval-prompts instead"),
    ],
)
def test_what_cannot_be_generated_is_refused_by_the_flag(flags: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        generated(**flags)
    assert problem in str(refused.value)


@needs("reasoning_gym")
def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    folder.parent.write_text("a file")
    with pytest.raises(ConfigurationError, match=r"cannot be written to .* \(next to --run-dir\)"):
        generated()


@pytest.mark.parametrize(
    ("flags", "package"),
    [
        ({"environment": "gymnasium:CartPole-v1"}, "gymnasium"),
        ({"environment": "reasoning_gym:chain_sum"}, "reasoning-gym"),
        ({"mcp_server": ("python a.py",)}, "mcp"),
    ],
)
def test_a_package_that_is_not_installed_is_one_line_with_its_extra(
    flags: dict[str, object], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as refused:
        check_environments(assemble(flags, {}).sessions)
    assert str(refused.value).endswith(f"the package {package} is not installed: pip install 'miles-async[{package}]'")
    if package == "mcp":
        monkeypatch.setattr(packages, "find_spec", lambda name: name)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.3.0")
        with pytest.raises(ConfigurationError, match=r"expected mcp 1\.x, found 2\.3\.0"):
            check_environments(assemble(flags, {}).sessions)


async def test_first_observations_of_a_server_become_prompts_and_others_are_held_out() -> None:
    async with serving(openenv(recording("openenv_game"))) as url:
        flags = {"environment": f"openenv:{url}/", "environment_prompts": 2, "environment_eval_prompts": 1}
        arguments = await asyncio.to_thread(generated, **flags, rollout_seed=7)
    assert [row["prompt"] for row in rows(arguments.data.prompt_data)] == ["rev 3160", "rev 2917"]
    assert arguments.evaluation.eval_prompt_data is not None
    assert [row["prompt"] for row in rows(arguments.evaluation.eval_prompt_data[1:])] == ["rev 4318"]
    assert arguments.data.label_key is None


@pytest.mark.parametrize("environment", ["openenv:http://127.0.0.1:1", "nemo-gym:http://127.0.0.1:1"])
async def test_a_server_is_looked_at_when_the_run_starts_with_tools_of_others_too(
    environment: str, tmp_path: Path
) -> None:
    check_environments(assemble({"environment": environment}, {}).sessions)  # starts nothing, asks nobody
    for tools, count in (((), 1), (("python a.py",), 2)):
        sessions = assemble({"environment": environment, "mcp_server": tools}, {}).sessions
        *_, server = services = run_environments(sessions, tmp_path).services
        assert len(services) == count
        with pytest.raises(
            ConfigurationError, match=r"at http://127.0.0.1:1 \(--environment\), found .*Cannot connect"
        ):
            await server.start()
