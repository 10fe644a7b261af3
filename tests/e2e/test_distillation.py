"""A student learns from a teacher's log-probs what the teacher had learned from rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.real_run import real_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FLEET = """
[groups.train]
engines = 1
[groups.teacher]
role = "frozen"
model = "{model}"
"""


def test_a_student_becomes_like_its_teacher(tmp_path: Path) -> None:
    taught = tmp_path / "teacher-hf"
    flags = ("--num-rollout", "30", "--eval-interval", "none", "--save-hf", str(taught))
    with real_run(tmp_path / "teacher", *flags) as run:
        assert run.wait(400) == 0, run.output
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET.format(model=taught))
    flags = ("@preset:on-policy-distillation", "--server-groups", str(fleet), "--num-rollout", "20")
    with real_run(tmp_path / "student", *flags, "--eval-interval", "20") as run:
        assert run.wait(400) == 0, run.output
        run.assert_nothing_left()
    assert run.summary["eval_accuracy_last"] > 0.95
    assert run.summary["balanced"]
    divergence = [step["train/opd_reverse_kl"] for step in run.steps]
    assert divergence[0] > 0.5 > 10 * max(divergence[-3:])
