"""A model is taught by examples, and teaches another one by its log-probs: neither looks at a reward."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.quickstart.tasks import TASKS
from examples.quickstart.warm_start import accuracy
from tests.integration.real_run import real_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SFT = (sys.executable, "-m", "miles_async", "train", "@examples/quickstart/sft.args")
FLEET = """
[groups.train]
engines = 1
[groups.teacher]
role = "frozen"
model = "{model}"
"""


def test_examples_teach_a_model_that_teaches_another(tmp_path: Path) -> None:
    # covers: C9
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    taught, checkpoints = tmp_path / "teacher-hf", tmp_path / "checkpoints"
    flags = ("--save", str(checkpoints), "--save-interval", "20", "--save-hf", str(taught))
    with real_run(tmp_path / "half", "--num-rollout", "20", "--save", str(checkpoints), command=SFT) as run:
        assert run.wait(400) == 0, run.output
        first = run.steps
    with real_run(tmp_path / "teacher", *flags, "--load", str(checkpoints), command=SFT) as run:
        assert run.wait(400) == 0, run.output
        run.assert_nothing_left()
        second = run.steps
    assert [len(first), len(second)] == [20, 40]
    losses = [step["train/loss"] for step in (*first, *second)]
    assert losses[0] > 0.2 > 50 * losses[-1]
    assert {step["sft/length_mean"] for step in (*first, *second)} == {18.0}
    assert not any(name.startswith("train/logprob_diff") for name in second[0])
    model, tokenizer = Qwen3ForCausalLM.from_pretrained(taught), AutoTokenizer.from_pretrained(taught)
    assert accuracy(model, tokenizer, TASKS["reverse"], TASKS["reverse"].split()[1]) > 0.95

    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET.format(model=taught))
    flags = ("@preset:on-policy-distillation", "--server-groups", str(fleet), "--num-rollout", "20")
    with real_run(tmp_path / "student", *flags, "--eval-interval", "20") as run:
        assert run.wait(400) == 0, run.output
        run.assert_nothing_left()
    assert run.summary["eval_reward_last"] > 0.95
    assert run.summary["balanced"]
    divergence = [step["train/opd_reverse_kl"] for step in run.steps]
    assert divergence[0] > 0.5 > 3 * max(divergence[-3:])
