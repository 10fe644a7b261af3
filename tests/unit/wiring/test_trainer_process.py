"""The trainer's processes: what the driver tells them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from miles_async.arguments.model import ModelArguments
from miles_async.arguments.parser import parse_arguments
from miles_async.wiring.trainer_process import _version_bytes, trainer_ranks


def test_bytes_of_a_version_come_from_the_models_files_and_the_dtype_of_training(tmp_path: Path) -> None:
    # covers: C8
    save_file({"a": torch.zeros(3, 5, dtype=torch.float16)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(7), "c": torch.zeros(())}, tmp_path / "model-2.safetensors")
    assert _version_bytes(ModelArguments(hf_checkpoint=tmp_path), "none") == 23 * 4
    assert _version_bytes(ModelArguments(hf_checkpoint=tmp_path, bf16=True), "none") == 23 * 2
    sizes = {"hidden_size": 3, "vocab_size": 2, "num_attention_heads": 1, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"intermediate_size": 1}))
    assert _version_bytes(ModelArguments(hf_checkpoint=tmp_path, bf16=True), "fp8") == 12 * 2 + 11  # two of 3 × 2 stay
    (tmp_path / "model-3.safetensors").write_bytes(b"cut off")
    assert _version_bytes(ModelArguments(hf_checkpoint=tmp_path), "none") is None
    assert _version_bytes(ModelArguments(), "none") is None


def test_ranks_have_the_time_to_start_that_the_run_gives_them(tmp_path: Path) -> None:
    arguments = parse_arguments(["@preset:4x8"], prog="test").arguments
    ranks = trainer_ranks(arguments, tmp_path, "cuda", {}, None, {}, ())
    assert ranks._start_timeout == arguments.cluster.trainer_start_timeout == 1800
