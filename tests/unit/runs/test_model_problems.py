"""What keeps a model from being trained or served, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.arguments.parser import parse_arguments
from miles_async.runs.checks import model_problems

GLM5 = {
    "model_type": "glm_moe_dsa",
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "n_routed_experts": 4,
    "kv_lora_rank": 16,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False)])
def test_a_family_that_engines_serve_on_gpus_only_is_refused_on_a_cpu(
    device: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # covers: M21
    monkeypatch.setattr("miles_async.runtime.device.count_gpus", lambda: 8)
    (tmp_path / "config.json").write_text(json.dumps(GLM5))
    arguments = parse_arguments(["--hf-checkpoint", str(tmp_path), "--device", device], prog="test").arguments
    problems = list(model_problems(arguments))
    if refused:
        assert problems == [
            "--device cpu: engines cannot serve model_type 'glm_moe_dsa': SGLang 0.5.23 chooses the tokens of sparse "
            "attention with kernels for GPUs only; use --device cuda"
        ]
    else:
        assert problems == []


TEXT = {"model_type": "qwen2", "num_attention_heads": 4, "intermediate_size": 64}
IMAGES = {
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {},
}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), None),
        (("--environment-path", "m:Environment"), None),
        (("--agent-path", "m:agent"), None),
        (("--loss-type", "sft_loss"), None),
        (("--use-opd",), "--use-opd"),
        (("--critic-hf-checkpoint", "critic"), "--critic-hf-checkpoint"),
        (("--save-debug-rollout-data", "dumps/{rollout_id}.parquet"), "--save-debug-rollout-data"),
        (("--load-debug-rollout-data", "dumps/{rollout_id}.parquet"), "--load-debug-rollout-data"),
    ],
)
def test_images_are_refused_where_they_would_be_lost(flags: tuple[str, ...], named: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(IMAGES))
    words = ["--hf-checkpoint", str(tmp_path), "--device", "cpu", *flags]
    found = list(model_problems(parse_arguments(words, prog="test").arguments))
    if named is None:
        assert found == []
        return
    assert found[0] == f"{named}: images don't pass through it, and model_type 'qwen2_5_vl' reads images; leave it out"
    assert len(found) == 1 or named == "--critic-hf-checkpoint"  # there is none


def test_a_reference_model_reads_images_if_the_policy_does(tmp_path: Path) -> None:
    for name, config in {"text": TEXT, "images": IMAGES}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for policy, reference, refused in (("images", "images", 0), ("images", "text", 1)):
        words = ["--hf-checkpoint", str(tmp_path / policy), "--ref-hf-checkpoint", str(tmp_path / reference)]
        found = list(model_problems(parse_arguments(words, prog="test").arguments))
        assert len(found) == refused
        assert all("should both read images, or neither" in problem for problem in found)
