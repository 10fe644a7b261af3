"""What a run says at its start about flags that work as asked, and differ from what one may think."""

from __future__ import annotations

import json

import pytest

from miles_async.arguments.parser import assemble
from miles_async.runs.notes import run_notes
from miles_async.weights.fp8 import CONFIG


def notes(**values: object) -> list[str]:
    flags = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "device": "cpu"}
    return list(run_notes(assemble(flags | values, {})))


@pytest.mark.parametrize(
    ("values", "steps", "bound"),
    [
        ({"num_steps_per_rollout": 4, "max_weight_staleness": 2}, 4, 2),
        ({"ppo_epochs": 4, "max_weight_staleness": 2}, 4, 2),
        ({"global_batch_size": 16, "ppo_epochs": 2, "max_weight_staleness": 1}, 4, 1),
        ({"num_steps_per_rollout": 2, "on_policy": True}, 2, 0),
    ],
)
def test_optimizer_steps_that_age_a_batch_by_more_than_the_bound(
    values: dict[str, object], steps: int, bound: int
) -> None:
    # covers: C1
    (note,) = notes(**values)
    assert note.startswith(f"{steps} optimizer steps on each rollout batch")
    assert f"up to {steps - 1} optimizer steps older than its age says, more than the {bound} of the bound" in note


@pytest.mark.parametrize(
    "values",
    [
        {"max_weight_staleness": 0},
        {"num_steps_per_rollout": 4, "max_weight_staleness": 3},
        {"num_steps_per_rollout": 4},  # there is no bound
    ],
)
def test_no_note_within_the_bound(values: dict[str, object]) -> None:
    assert notes(**values) == []


@pytest.mark.parametrize(
    ("device", "backend", "said"), [("cuda", "flash", True), ("cuda", "auto", False), ("cpu", "flash", False)]
)
def test_a_flash_attn_that_is_not_installed(device: str, backend: str, said: bool) -> None:
    flags = {"device": device, "bf16": True}
    found = run_notes(assemble(flags, {"--megatron-attention-backend": (backend,)}))
    assert any("flash-attn-3 is installed, so Transformer Engine chooses (auto)" in note for note in found) == said


def test_wandb_is_not_shared_offline() -> None:
    (note,) = notes(use_wandb=True, wandb_mode="offline", wandb_shared=True)
    assert note.startswith("--wandb-shared has no effect offline")
    assert notes(use_wandb=True, wandb_mode="online", wandb_shared=True) == []


def test_flags_about_engines_that_these_engines_make_ineffective() -> None:
    external = {"rollout_external": ("a:1", "b:2")}
    passed = {"--sglang-mem-fraction-static": ("0.5",)}
    assert list(run_notes(assemble({"device": "cpu", **external}, passed))) == [
        "--sglang-mem-fraction-static: no effect on external engines, which are up already"
    ]
    assert list(run_notes(assemble({"device": "cpu"}, passed))) == []
    rolling = {"publish_order": "rolling", "pause_generation_mode": "retract"}
    (note,) = notes(**rolling)
    assert note.startswith(
        "--publish-order rolling --rolling-engines 1 with 1 engine(s) has no effect before `miles-async scale`"
    )
    assert notes(**rolling, rollout_num_gpus=2) == []


def test_engines_in_float8() -> None:
    fp8 = {"rollout_quantization": "fp8"}
    (note,) = notes(**fp8)
    assert note.startswith("--rollout-quantization fp8: engines sample from a model that is rounded")
    assert notes(**fp8, use_tis=True) == []
    (note,) = notes(**fp8, use_tis=True, rollout_external=("a:1",))
    assert note.startswith("--rollout-quantization fp8: external engines are up already")
    assert note.endswith(json.dumps(CONFIG))
    (note,) = notes(**fp8, debug_rollout_only=True)
    assert note == "--rollout-quantization fp8: no effect without a trainer: engines load --hf-checkpoint as it is"
    assert notes(**fp8, debug_train_only=True) == []


def test_a_warm_up_that_is_longer_than_the_run_is_told() -> None:
    (note,) = notes(lr_warmup_iters=5, num_rollout=3)
    assert note.startswith("--lr-warmup-iters 5 is longer than the run's 3 optimizer steps: the warm-up takes 3")
    (note,) = notes(critic_lr_warmup_iters=7, num_rollout=3, num_steps_per_rollout=2)
    assert note.startswith("--critic-lr-warmup-iters 7 is longer than the run's 6 optimizer steps")
    assert notes(lr_warmup_iters=3, num_rollout=3) == []


def test_values_without_effect_are_told() -> None:
    [found] = [note for note in notes(max_token_age=2, max_weight_staleness=2) if "--max-token-age" in note]
    assert found.startswith("--max-token-age 2 has no effect with --max-weight-staleness 2")
