"""Environments of other packages: the examples that need no server."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from examples.environments import harbor_agent
from miles_async.integrations.gymnasium_text import GymnasiumText
from miles_async.types import Prompt
from tests.extras import needs
from tests.fakes.turns import answer

EXAMPLES = Path(harbor_agent.__file__).parent
HARBOR = """#!/bin/sh
test "$1 $2 $3 $4" = "trial start -p tasks/hello" && mkdir "$6/hello__1" &&
echo '{"verifier_result": %s, "exception_info": null}' > "$6/hello__1/result.json"
"""


async def test_an_episode_of_the_game_has_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    make = GymnasiumText("gymnasium_reverse:Reverse-v0", {})
    row, another = make.rows(2, seed=7)
    assert row["prompt"].startswith("rev ")
    assert row["prompt"] != another["prompt"]
    episode = make(Prompt(prompt_id="p", token_ids=(1,), text=row["prompt"], metadata=row["metadata"]))
    first = await episode.step(answer(row["prompt"][:3:-1], 0))
    assert (first.done, first.reward) == (False, 0.5)
    last = await episode.step(answer(first.messages[0]["content"][:3:-1], 1))
    assert (last.done, last.reward) == (True, 1.0)
    await episode.close()


@needs("reasoning_gym")
def test_a_task_of_reasoning_gym_generates_prompts() -> None:
    from miles_async.integrations.reasoning_gym_tasks import rows

    row, again = (next(rows("chain_sum", {"max_terms": 3}, 1, 42)) for _ in range(2))
    assert row == again
    assert row["metadata"]["source_dataset"] == "chain_sum"
    assert int(row["label"]) == eval(row["metadata"]["expression"])


def harbor_says(verified: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "harbor"
    program.write_text(HARBOR % verified)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"metadata": {"task": "tasks/hello"}}'))
    harbor_agent.main()


def test_the_reward_of_harbors_verifier_is_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    harbor_says('{"rewards": {"reward": 1.0}}', tmp_path, monkeypatch)
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == [None, 1.0]


def test_a_trial_of_harbor_without_a_reward_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="75"):
        harbor_says("null", tmp_path, monkeypatch)
