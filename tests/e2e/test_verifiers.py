"""Verifiers on the real stack, where there is a Python that has it: VERIFIERS_PYTHON=verifiers/bin/python."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.example_runs import trained_samples
from tests.integration.real_run import real_run
from tests.unit.test_extending_pages import PAGES, files

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

PYTHON = os.environ.get("VERIFIERS_PYTHON")


@pytest.mark.skipif(PYTHON is None, reason="VERIFIERS_PYTHON names no Python with verifiers 0.4")
def test_tasks_of_verifiers_are_played_in_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # covers: R2, R3, C2
    (tmp_path / "my_tasks.py").write_text(files(PAGES.parent / "environments.md")["my_tasks"])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    tasks = ("--environment", "verifiers:my_tasks", "--environment-python", str(PYTHON))
    config = ("--environment-config", '{"agent": {"harness": {"id": "null"}}}', "--environment-prompts", "64")
    other = ("--environment-path", "none", "--max-turns", "16", "--prompt-data", "none", "--eval-prompt-data", "none")
    sizes = ("--eval-interval", "none", "--eval-temperature", "none", "--num-rollout", "2", "--rollout-batch-size", "4")
    group = ("--n-samples-per-prompt", "4", "--record")
    command = ("examples/calculator_tool/run.sh",)
    with real_run(tmp_path / "run", *tasks, *config, *other, *sizes, *group, command=command) as run:
        assert run.wait(900) == 0, run.output
        run.assert_nothing_left()
    assert run.summary["balanced"]
    assert run.summary["groups"]["failed"] == 0
    samples = [*trained_samples(run)]
    assert len(samples) == 2 * 4 * 4
    for sample in samples:
        assert sample.metadata["agent_turns"] == sample.metadata["turns"] == 1
        assert sample.loss_mask[sample.prompt_length :].all()
        assert sample.reward in (0.0, 1.0)
    assert run.summary["logprob_diff"]["max"] < 1e-4
