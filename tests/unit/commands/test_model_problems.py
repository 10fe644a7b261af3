"""What keeps a model from being trained or served, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.arguments.parser import parse_arguments
from miles_async.commands.checks import model_problems

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
