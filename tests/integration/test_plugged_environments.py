"""Small environments of other packages on the real stack."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from statistics import mean

import pytest

from tests.extras import needs
from tests.integration.example_runs import assert_observations_carry_no_loss, trained_samples
from tests.integration.page_views import assert_views_show
from tests.integration.real_run import ROOT, RealRun, real_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]

OTHER_PROMPTS = ("--prompt-data", "none", "--eval-prompt-data", "none", "--eval-interval", "none", "--rm-type", "none")


def page_command() -> tuple[str, list[str]]:
    """PYTHONPATH and words of the command of docs/environments.md that trains on the quick start's model."""
    page = (ROOT / "docs/environments.md").read_text().replace("\\\n", " ")
    ((path, words),) = re.findall(
        r"^    PYTHONPATH=(\S+) \.venv/bin/miles-async (train @examples.*)$", page, re.MULTILINE
    )
    return path, shlex.split(words)


def trained(tmp_path: Path, command: tuple[str, ...], *flags: str) -> RealRun:
    with real_run(tmp_path / "run", "--record", *flags, command=command) as run:
        assert run.wait(390) == 0, run.output
        run.assert_nothing_left()
    assert run.summary["balanced"]
    assert run.summary["groups"]["quarantined"] == run.summary["groups"]["failed"] == 0
    assert run.summary["logprob_diff"]["max"] < 1e-4
    return run


@pytest.mark.long
def test_an_environment_of_gymnasium_is_learned(
    imported_reverse: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: R2, R3, C2
    path, words = page_command()
    monkeypatch.setenv("PYTHONPATH", str(ROOT / path), prepend=":")
    command = (*imported_reverse[: imported_reverse.index("train")], *words)
    run = trained(tmp_path, command, "--num-rollout", "30", "--eval-interval", "none")
    for sample in trained_samples(run):
        assert_observations_carry_no_loss(sample)
        assert sample.metadata["turns"] <= 2 + sample.metadata["metrics"]["invalid_actions"]
    rows = assert_views_show(run.run_dir)
    assert max(len(row.turns) for row in rows) > 1
    assert all(row.reward_parts is not None for row in rows)  # invalid_actions
    rewards = [step["reward/mean"] for step in run.steps]
    assert mean(rewards[-5:]) > mean(rewards[:3]) + 0.06  # 0.14 and 0.16 were seen; a mean of a step errs by 0.02
    assert run.summary["eval_reward_first"] is not None


@needs("reasoning_gym")
def test_questions_of_reasoning_gym_are_asked_and_scored(imported_reverse: tuple[str, ...], tmp_path: Path) -> None:
    # covers: R3, C2
    config = '{"min_terms": 2, "max_terms": 2, "max_digits": 1}'
    task = ("--environment", "reasoning_gym:chain_sum", "--environment-config", config)
    run = trained(tmp_path, imported_reverse, *OTHER_PROMPTS, *task, "--num-rollout", "3")
    rewards = {sample.reward for sample in trained_samples(run)}
    assert len(rewards) > 2  # the task's own scores, not only right or wrong
    assert all(0 <= reward <= 1 for reward in rewards)
