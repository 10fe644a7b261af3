"""An example of agents on the real stack, for a few steps; tests/e2e/test_examples.py runs all of them to their end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.example_runs import assert_turns_were_trained
from tests.integration.real_run import real_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]

STEPS = 3


def test_the_calculator_is_called_and_its_answers_carry_no_loss(tmp_path: Path) -> None:
    # covers: R2, R3, C2, C7
    flags = ("--num-rollout", str(STEPS), "--eval-prompt-data", "none", "--eval-interval", "none", "--record")
    with real_run(tmp_path / "run", *flags, command=("examples/calculator_tool/run.sh",)) as run:
        assert run.wait(300) == 0, run.output
        run.assert_nothing_left()
    assert_turns_were_trained(run, STEPS, most_turns=2)
