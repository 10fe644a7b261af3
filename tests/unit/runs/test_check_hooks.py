"""Checks of a run that need the code behind its ``module:attr`` flags, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.parser import assemble
from miles_async.errors import ConfigurationError
from miles_async.runs.checks import check_hooks


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"lora_rank": 4}, "--lora-rank 4 with --token-advantages own_baseline:Critic: a critic is trained whole"),
        ({"num_critic_only_steps": 5, "num_rollout": 5}, "--num-critic-only-steps 5 leaves none of --num-rollout 5"),
    ],
)
def test_own_token_advantages_that_need_a_critic_are_refused_where_gae_is(
    flags: dict[str, object], problem: str, own_baseline: None
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        check_hooks(with_advantages("Critic", flags))


@pytest.mark.parametrize("flags", [{"critic_lr": 1e-5}, {"value_clip": None}, {"num_critic_only_steps": 1}])
def test_flags_of_a_critic_are_refused_where_own_token_advantages_need_none(
    flags: dict[str, object], own_baseline: None
) -> None:
    check_hooks(with_advantages("Baseline", {"lora_rank": 4}))
    check_hooks(with_advantages("Critic", flags | {"num_rollout": 2}))
    flag = f"--{min(flags).replace('_', '-')}"
    with pytest.raises(ConfigurationError, match=f"{flag} has no effect with --token-advantages own_baseline:Base"):
        check_hooks(with_advantages("Baseline", flags))


def with_advantages(name: str, flags: Mapping[str, object]) -> Arguments:
    advantages = {"token_advantages": f"own_baseline:{name}", "advantage_estimator": "reinforce", "rm_type": "math"}
    return assemble(advantages | flags, {})


@pytest.fixture
def own_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_baseline.py").write_text(
        "class Baseline:\n    needs = ()\n    def __init__(self, arguments): ...\n    def __call__(self, batch): ...\n"
        "class Critic(Baseline):\n    needs = ('values',)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_baseline", raising=False)
