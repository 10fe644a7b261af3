"""Durations of a plan: as given, estimated with ``--gpu``, or missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.commands import memory
from miles_async.commands.plan import plan
from miles_async.errors import ConfigurationError

CONFIG = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}
SMALL = (
    "--rollout-batch-size",
    "2",
    "--n-samples-per-prompt",
    "2",
    "--steps",
    "2",
    "--sweep",
    "max-weight-staleness=2",
)
CORRECTED = ("--use-rollout-logprobs", *SMALL)
ONE_TRILLION = "@examples/one_trillion/run.args"


@pytest.fixture
def model(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ("--hf-checkpoint", str(tmp_path), "--bf16", *CORRECTED)


def test_what_is_not_given_is_estimated(model: tuple[str, ...]) -> None:
    text = plan([*model, "--gpu", "h100", "--response-tokens", "1000"])
    assert text.startswith("Estimated, not measured")
    assert "Recommended" in text


def test_what_is_given_wins(model: tuple[str, ...]) -> None:
    estimated = ("--gpu", "h100", "--response-tokens", "1000")
    assert "T_train 77," in plan([*model, *estimated, "--train-seconds", "77"])
    assert "T_train 77," not in plan([*model, *estimated])


def test_without_an_estimate_durations_are_required(model: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="--latency, --train-seconds; or, to have them estimated, --gpu"):
        plan(model)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--gpu", "h100"), "--response-tokens is missing"),
        (("--gpu", "h100", "--response-tokens", "9", "--hf-checkpoint", "absent"), "no sizes in absent"),
        (("--gpu", "h100", "--response-tokens", "9", "--rollout-external", "10.0.0.1:80"), "not external ones"),
        (("--gpu", "h100", "--response-tokens", "9", "--mfu", "2"), "a share of at most 1, found 2"),
    ],
)
def test_what_cannot_be_estimated_is_refused(model: tuple[str, ...], words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        plan([*model, *words])


def test_the_plan_of_a_large_run_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags and its layout; tests/integration/test_memory_plan.py measures smaller ones."""
    monkeypatch.setattr(memory, "measure", lambda request: [])
    with pytest.raises(ValueError, match="empty"):  # all checks are passed: only the measured stages are missing
        plan([ONE_TRILLION, "--memory"])
    with pytest.raises(ConfigurationError, match="--decoder-last-pipeline-num-layers 6 does not divide"):
        plan([ONE_TRILLION, "--memory", "--decoder-last-pipeline-num-layers", "6"])
