"""The dry run refuses what would fail at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.arguments import SessionsArguments
from miles_async.arguments.parser import assemble
from miles_async.arguments.surroundings import check_machine, check_outputs
from miles_async.errors import ConfigurationError
from miles_async.runs.checks import passed_on_problems, place_problems
from miles_async.wiring.environments import try_environment


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            {"train_backend": "megatrn"},
            "--train-backend megatrn: expected one of ['megatron'] (entry points miles_async.backends); did you mean",
        ),
        ({"network_interface": "eth99"}, "--network-interface eth99: expected an interface of every node, found"),
    ],
)
def test_a_backend_and_an_interface_that_are_not_there(flags: dict[str, str], problem: str, tmp_path: Path) -> None:
    (found,) = place_problems(assemble({"run_dir": tmp_path / "run", **flags}, {}))
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"tensorboard_dir": Path("/proc/none/x")}, "--tensorboard-dir /proc/none/x: /proc cannot be written to"),
        (
            {"save_debug_rollout_data": Path("/proc/none/{rollout_id}.parquet")},
            "--save-debug-rollout-data /proc/none/{rollout_id}.parquet: /proc cannot be written to",
        ),
        ({"image_root": Path("/none")}, "--image-root /none: there is no such directory"),
        (
            {"host": "no-such-host.invalid"},
            "--host no-such-host.invalid: expected an address or a name of this machine",
        ),
    ],
)
def test_folders_and_addresses_that_are_not_there(flags: dict[str, object], problem: str, tmp_path: Path) -> None:
    flags = {"run_dir": tmp_path / "run", **flags}
    arguments, elsewhere = assemble(flags, {}), assemble(flags | {"ray_address": "head:6379"}, {})
    (found,) = [*check_outputs(arguments), *check_machine(arguments)]
    assert found.startswith(problem)
    assert len([*check_outputs(elsewhere), *check_machine(elsewhere)]) == ("proc" in problem)


def test_a_frozen_model_that_is_not_there(tmp_path: Path) -> None:
    groups = tmp_path / "groups.toml"
    groups.write_text('[groups.a]\n[groups.b]\nrole = "frozen"\nmodel = "/none"\n')
    (found,) = check_machine(assemble({"server_groups": groups}, {}))
    assert found.endswith("[groups.b]: model /none: there is no such directory (nothing is downloaded)")


def test_a_policy_that_the_router_does_not_have() -> None:
    (found,) = passed_on_problems(assemble({"sglang_router_policy": "roundrobin"}, {}))
    assert found.startswith("--sglang-router-policy roundrobin: expected one of random, round_robin, ")
    assert found.endswith("; did you mean round_robin?")
    assert list(passed_on_problems(assemble({"sglang_router_policy": "random"}, {}))) == []


@pytest.mark.parametrize(
    ("environment", "problem"),
    [("gymnasium:Nosuch-v1", "NameNotFound"), ("gymnasium:CartPole-v1", "expected Text as observation space")],
)
def test_an_environment_of_gymnasium_that_cannot_be_played(environment: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--environment {environment}: {problem}"):
        try_environment(SessionsArguments(environment=environment))
