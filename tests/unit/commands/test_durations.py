"""Durations of a plan: as given, estimated with ``--gpu``, or missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from miles_async.api import TokenBatch
from miles_async.arguments import AlgorithmArguments
from miles_async.commands.gpu_report import FORMAT
from miles_async.commands.plan import plan
from miles_async.errors import ConfigurationError
from miles_async.machine.packages import versions_tested
from miles_async.runs import memory

CONFIG = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}
SMALL = "--rollout-batch-size 2 --n-samples-per-prompt 2 --steps 2 --sweep max-weight-staleness=2"
CORRECTED = ("--use-rollout-logprobs", *SMALL.split())
ESTIMATED = ("--gpu", "h100", "--response-tokens", "1000")
ONE_TRILLION = "@examples/one_trillion/run.args"


@pytest.fixture
def model(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ("--hf-checkpoint", str(tmp_path), "--bf16", *CORRECTED)


def test_what_is_not_given_is_estimated(model: tuple[str, ...]) -> None:
    text = plan([*model, *ESTIMATED])
    assert text.startswith("Estimated, not measured")
    assert "Recommended" in text


@pytest.mark.parametrize(("name", "message"), [("plan.txt", "ends with .png"), ("none/plan.png", "no directory")])
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_simulated(
    name: str, message: str, model: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan([*model, *ESTIMATED, "--output", str(tmp_path / name)])


def test_what_is_given_wins(model: tuple[str, ...]) -> None:
    assert "T_train 77," in plan([*model, *ESTIMATED, "--train-seconds", "77"])
    assert "T_train 77," not in plan([*model, *ESTIMATED])


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., str]:
    """Write the report.json of a machine whose training reaches 10 % of an H100's FLOP/s."""
    machine = {"device": "8 × NVIDIA H100 80GB HBM3", "date": "2026-11-26", **versions_tested("cuda")}
    shares = {"mfu": 0.1, "decode_use": 0.2, "link": 5e9, "copy": 4e9}
    plan_figures = {"transport": "distributed", "weights": 600_000_000, "shares": shares}
    step = {"key": "lengths", "verdict": "passed", "figures": {"start, s": 72.0, "plan": [plan_figures]}}

    def write(*, format: int = FORMAT, verdict: str = "passed", **changed: str) -> str:
        found = {"format": format, "machine": machine | changed, "outcomes": [step | {"verdict": verdict}]}
        (tmp_path / "report.json").write_text(json.dumps(found))
        return str(tmp_path / "report.json")

    return write


def test_what_a_report_measured_is_not_assumed(model: tuple[str, ...], report: Callable[..., str]) -> None:
    words = (*model, "--gpu", report(), "--response-tokens", "1000")

    def told(*more: str) -> tuple[str, str]:
        measured, _, assumed = plan([*words, *more]).partition("Measured in")[2].partition("Assumed")
        return measured, assumed

    measured, assumed = told()
    for share in ("training reaches 10% of", "decoding 20% of", "a sender 5 GB/s", "4 GB/s to host memory"):
        assert share in measured
    assert "files are written" in assumed
    assert publications(plan([*words]))["distributed (chosen)"] == ("1", "0.0663", "0", "0.0531")
    assert "training reaches 50%" in told("--mfu", "0.5")[1], "a flag wins"
    assert "a sender 50 GB/s" in told("--weight-transport", "disk")[1], "another transport was not measured"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"sglang": "0.1"}, r"in brackets\), found sglang 0.1 \("),
        ({"device": "NVIDIA L4"}, "one of a100, h100, h200, b200, found 'NVIDIA L4'"),
        ({"device": "CPU (a rehearsal)"}, "found 'CPU"),
        ({"format": 1}, "in format 2, found format 1"),
        ({"verdict": "failed"}, "expected that the step lengths passed"),
    ],
)
def test_a_report_of_something_else_is_refused(
    model: tuple[str, ...], report: Callable[..., str], changed: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        plan([*model, "--gpu", report(**changed), "--response-tokens", "1000"])


def publications(text: str) -> dict[str, tuple[str, ...]]:
    """(senders, seconds of the copy, beside training, of the pause) by transport, as printed."""
    rows = [line.split() for line in text.splitlines() if line.startswith(("distributed", "disk", "object_store"))]
    return {" ".join(row[:-4]): tuple(row[-4:]) for row in rows}


# 2 × 32000 × 1024 weights of embedding and output, 4 × (4 × 1024² + 3 × 1024 × 4096) of layers: 0.2653 GB in bf16.
FOUR_STAGES = ("--pipeline-model-parallel-size", "4", "--actor-num-gpus-per-node", "4")


def test_every_transport_has_its_senders(model: tuple[str, ...]) -> None:
    """Each pipeline stage sends over links; with files of a shared file system, one rank does."""
    found = publications(plan([*model, *FOUR_STAGES, *ESTIMATED]))
    assert found == {
        "distributed (chosen)": ("4", "0.00332", "0", "0.00133"),
        "disk": ("1", "0.0133", "0.115", "0.115"),
        "object_store": ("4", "0.00332", "0.00133", "0.115"),
    }


def test_the_transport_of_the_run_is_simulated(model: tuple[str, ...]) -> None:
    text = plan([*model, *FOUR_STAGES, *ESTIMATED, "--weight-transport", "disk", "--steps", "40"])
    assert "disk (chosen)" in publications(text)
    found = [float(re.search(rf"{name} ([\d.]+)", text)[1]) for name in ("T_pause", "T_copy")]  # type: ignore[index]
    assert found == pytest.approx([0.1154, 0.01327], rel=0.05)  # means; one more or less at the ends


def test_changes_alone_are_brought(model: tuple[str, ...]) -> None:
    """And engines load all files: few elements change, but in every one of them."""
    flags = ("--weight-transport", "disk", "--weight-delta", "xor", "--steps", "8")
    text = plan([*model, *FOUR_STAGES, *ESTIMATED, *flags])
    assert publications(text)["disk (chosen)"] == ("1", "0.0133", "0.00346", "0.115")
    assert publications(text)["object_store"] == ("4", "0.00332", "3.98e-05", "0.115")
    assert publications(text)["distributed"] == ("4", "0.00332", "0", "0.00133")


ON_FOUR = ("--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "4", "--gpu-memory-gb", "1")
# Bytes of a token in all 16 heads of all layers, and weights that every rank of data-parallel attention has.
PER_TOKEN, SHARED, COPIED = 4 * 2 * 1024 * 2, 4 * 3 * 1024 * 4096 + 1024 * 32000, 4 * 4 * 1024**2 + 1024 * 32000


@pytest.mark.parametrize(
    ("flags", "room"),
    [
        ((), 4 * (0.85 * 2**30 - 2 * (SHARED + COPIED) / 4) / PER_TOKEN),
        (("--sglang-kv-cache-dtype", "fp8_e4m3"), 8 * (0.85 * 2**30 - 2 * (SHARED + COPIED) / 4) / PER_TOKEN),
        (("--sglang-attn-dp-size", "4"), 4 * (0.85 * 2**30 - 2 * (SHARED / 4 + COPIED)) / PER_TOKEN),
    ],
    ids=["tensor parallel", "fp8", "data parallel"],
)
def test_requests_fill_all_caches_of_an_engine(model: tuple[str, ...], flags: tuple[str, ...], room: float) -> None:
    """A request has 512 tokens of prompt and, in the middle of its time, 500 of its response."""
    text = plan([*model, *ON_FOUR, *flags, *ESTIMATED, "--rollout-concurrency-per-engine", "500"])
    assert f"an engine runs {int(room / 1012)} requests at once" in text


class OfEntropy:
    """Token advantages that need the entropy of every token."""

    needs = ("entropy",)

    def __init__(self, arguments: AlgorithmArguments) -> None: ...

    def __call__(self, batch: TokenBatch) -> Tensor:
        return batch.entropy


ONE = ("--advantage-estimator", "reinforce")
CRITIC = (*ONE, "--token-advantages", "gae")


@pytest.mark.parametrize(
    ("flags", "forwards"),
    [
        ((), 3),
        (("--recompute-granularity", "full"), 4),
        (("--use-kl-loss", "--kl-loss-coef", "0.1"), 3 + 1),
        ((*ONE, "--token-advantages", "kl_in_reward", "--kl-coef", "0.1"), 3 + 1),
        (("--token-advantages", f"{__name__}:OfEntropy"), 3 + 1),
        (CRITIC, 3 + 1 + 3),
        ((*CRITIC, "--critic-updates-per-step", "2", "--recompute-granularity", "full"), 4 + 1 + 2 * 4),
        (("--advantage-estimator", "opob"), 3 + 3),
        (("--ppo-epochs", "2"), 2 * 3),
        (("--no-use-rollout-logprobs", "--use-tis", "--global-batch-size", "2"), 3 + 1 / 2),
        (("--no-use-rollout-logprobs", "--use-tis", "--ppo-epochs", "2"), 2 * 3 + 1),
        (("--no-use-rollout-logprobs", "--use-tis", "--prox-logp-method", "snapshots"), 3 + 1),
        (("--no-use-rollout-logprobs", "--use-tis", "--prox-logp-method", "loglinear"), 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_training_step_has_all_passes(model: tuple[str, ...], flags: tuple[str, ...], forwards: float) -> None:
    """Forward passes of 4 sequences of 1,512 tokens on one GPU; a backward pass counts as two."""
    layers, output, pair = 4 * (4 * 1024**2 + 3 * 1024 * 4096), 1024 * 32000, 4 * 16 * 64 * 2
    forward = 2 * 4 * (1512 * (layers + output) + 1512**2 / 2 * pair)
    seconds = forwards * forward / (989e12 * 0.35)
    assert f"a training step {seconds:.3g} s" in plan([*model, *flags, *ESTIMATED])


def test_without_an_estimate_durations_are_required(model: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="--latency, --train-seconds; or, to have them estimated, --gpu"):
        plan(model)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--gpu", "h100"), "--response-tokens is missing"),
        ((*ESTIMATED, "--hf-checkpoint", "absent"), "no sizes in absent"),
        ((*ESTIMATED, "--rollout-external", "10.0.0.1:80"), "not external ones"),
        ((*ESTIMATED, "--mfu", "2"), "a share of at most 1, found 2"),
    ],
)
def test_what_cannot_be_estimated_is_refused(model: tuple[str, ...], words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        plan([*model, *words])


def test_the_plan_of_a_large_run_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags and its layout; tests/integration/test_memory_plan.py measures smaller ones."""
    monkeypatch.setattr(memory, "measure", lambda request: {"full": []})
    with pytest.raises(ValueError, match="empty"):  # all checks are passed: only the measured stages are missing
        plan([ONE_TRILLION, "--memory"])
    with pytest.raises(ConfigurationError, match="--decoder-last-pipeline-num-layers 6 does not divide"):
        plan([ONE_TRILLION, "--memory", "--decoder-last-pipeline-num-layers", "6"])
