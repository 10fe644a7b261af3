"""What the dry run tries that a start would find later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miles_async.arguments import Arguments, ClusterArguments, ModelArguments, SessionsArguments
from miles_async.errors import ConfigurationError
from miles_async.runs.checks import place_problems
from miles_async.wiring.environments import try_environment


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            Arguments(model=ModelArguments(train_backend="megatrn")),
            "--train-backend megatrn: expected one of ['megatron'] (entry points miles_async.backends); did you mean",
        ),
        (
            Arguments(cluster=ClusterArguments(network_interface="eth99")),
            "--network-interface eth99: expected an interface of every node, found",
        ),
    ],
)
def test_a_backend_and_an_interface_that_are_not_there(arguments: Arguments, problem: str, tmp_path: Path) -> None:
    observability = replace(arguments.observability, run_dir=tmp_path / "run")
    (found,) = place_problems(replace(arguments, observability=observability))
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("environment", "problem"),
    [("gymnasium:Nosuch-v1", "NameNotFound"), ("gymnasium:CartPole-v1", "expected Text as observation space")],
)
def test_an_environment_of_gymnasium_that_cannot_be_played(environment: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--environment {environment}: {problem}"):
        try_environment(SessionsArguments(environment=environment))
