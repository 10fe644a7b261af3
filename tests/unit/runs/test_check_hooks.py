"""Checks of a run that need the code behind its ``module:attr`` flags, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.arguments.parser import assemble
from miles_async.errors import ConfigurationError
from miles_async.runs.checks import check_hooks


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"lora_rank": 4}, "--lora-rank 4 with --token-advantages own_baseline:Baseline: a critic is trained whole"),
        ({"num_critic_only_steps": 5, "num_rollout": 5}, "--num-critic-only-steps 5 leaves none of --num-rollout 5"),
    ],
)
def test_own_token_advantages_that_need_a_critic_are_refused_where_gae_is(
    flags: dict[str, object], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, needs in enumerate(("()", "('values',)")):
        module = tmp_path / str(number) / "own_baseline.py"
        module.parent.mkdir()
        module.write_text(
            f"class Baseline:\n    needs = {needs}\n    def __init__(self, arguments): ...\n"
            "    def __call__(self, batch): ...\n"
        )
    given = assemble(
        {"token_advantages": "own_baseline:Baseline", "advantage_estimator": "reinforce", "rm_type": "math"} | flags, {}
    )
    monkeypatch.syspath_prepend(tmp_path / "0")
    check_hooks(given)
    monkeypatch.delitem(__import__("sys").modules, "own_baseline")
    monkeypatch.syspath_prepend(tmp_path / "1")
    with pytest.raises(ConfigurationError, match=problem):
        check_hooks(given)
