"""A model directory that is not whole, or not what its config.json says, is refused by its headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from miles_async.arguments.model_files import directory_problems, read_shapes
from tests.integration.tiny_models import save_tiny

CONFIG: dict[str, object] = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
}
LAYER = {
    "input_layernorm": (8,),
    "self_attn.q_proj": (12, 8),
    "self_attn.k_proj": (6, 8),
    "self_attn.o_proj": (8, 12),
    "self_attn.q_norm": (3,),
    "mlp.down_proj": (8, 12),
    "mlp.experts.0.down_proj": (8, 5),  # sizes of experts have other names
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards and their index."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shards = {
        "a.safetensors": {"model.embed_tokens.weight": (10, 8), **_layer(0)},
        "b.safetensors": {"model.norm.weight": (8,), "lm_head.weight": (10, 8), **_layer(1)},
    }
    for name, shapes in shards.items():
        save_file({tensor: np.zeros(shape, np.float32) for tensor, shape in shapes.items()}, tmp_path / name)
    weight_map = {tensor: name for name, shapes in shards.items() for tensor in shapes}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def _layer(number: int) -> dict[str, tuple[int, ...]]:
    return {f"model.layers.{number}.{name}.weight": shape for name, shape in LAYER.items()}


def problems(model: Path) -> str:
    return "\n".join(directory_problems(model, "--hf-checkpoint"))


def configure(model: Path, **changes: object) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | changes))


def test_a_whole_model_passes(model: Path):
    assert problems(model) == ""
    assert read_shapes(model / "a.safetensors")["model.embed_tokens.weight"] == (10, 8)


def test_a_shard_that_was_cut_off(model: Path):
    shard = model / "b.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-100])
    assert f"b.safetensors: expected {size} bytes, found {size - 100}: the file was cut off" in problems(model)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 8, b"version https://git-lfs", b"\x02\x00\x00\x00\x00\x00\x00\x00{}x"]
)
def test_a_file_that_is_none_of_safetensors(model: Path, content: bytes):
    (model / "b.safetensors").write_bytes(content)
    assert "--hf-checkpoint" in problems(model)
    assert "b.safetensors: expected" in problems(model)


def test_a_shard_that_was_not_downloaded(model: Path):
    (model / "b.safetensors").unlink()
    assert "index.json names 1 file(s) that are not there: b.safetensors; download them again" in problems(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 11}, "2 tensor(s) differ from config.json: model.embed_tokens.weight is [10, 8]"),
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight is [6, 8], and by config.json [12, 8]"),
        ({"intermediate_size": 6}, "model.layers.0.mlp.down_proj.weight is [8, 12], and by config.json [8, 6]"),
        ({"num_hidden_layers": 3}, "the weights have 2 layers, config.json says num_hidden_layers 3"),
        ({"num_hidden_layers": 1}, "the weights have 2 layers, config.json says num_hidden_layers 1"),
    ],
    ids=str,
)
def test_weights_of_another_model(model: Path, changes: dict[str, object], message: str):
    configure(model, **changes)
    assert message in problems(model)


def test_layers_for_multi_token_prediction_are_stored_behind_the_others(model: Path):
    configure(model, num_hidden_layers=1, num_nextn_predict_layers=1)
    assert problems(model) == ""


@pytest.mark.parametrize("family", ["nemotron-h", "nemotron-h-moe", "gemma4", "gemma4-moe"])
def test_models_of_unlike_layers_are_whole(family: str, tmp_path: Path):
    save_tiny(family, tmp_path)
    assert problems(tmp_path) == ""


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_hybrid_models_have_gates_and_norms_of_heads(family: str, tmp_path: Path):
    save_tiny(family, tmp_path)
    assert problems(tmp_path) == ""
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2}))
    assert "2 tensor(s) differ from config.json: model.layers.1.self_attn" in problems(tmp_path)


def test_a_vision_language_model_may_have_names_of_its_own_for_the_language_model(model: Path):
    for file in model.glob("*.safetensors"):
        save_file(
            {f"model.language_{name}": array for name, array in load_file(file).items() if name != "lm_head.weight"},
            file,
        )
    assert problems(model) == ""
    configure(model, num_hidden_layers=3, vocab_size=11)
    assert "the weights have 2 layers" in problems(model)
    assert "model.embed_tokens.weight is [10, 8], and by config.json [11, 8]" in problems(model)


def test_experts_that_engines_would_read_transposed(model: Path):
    configure(model, model_type="qwen3_vl_moe", num_experts=2, moe_intermediate_size=5)
    published = {"gate_up_proj": np.zeros((2, 8, 10), np.float32), "down_proj": np.zeros((2, 5, 8), np.float32)}
    for file, tensors in (("a", published), ("b", {name: each.swapaxes(1, 2) for name, each in published.items()})):
        layer = "01"["ab".index(file)]
        path = model / f"{file}.safetensors"
        named = {f"model.layers.{layer}.mlp.experts.{name}": each.copy() for name, each in tensors.items()}
        save_file(load_file(path) | named, path)
    found = problems(model)
    assert "2 tensor(s) of experts are not [experts, input, output] as published" in found
    assert "model.layers.1.mlp.experts." in found
    assert "layers.0" not in found
    assert "write each with .transpose(1, 2)" in found


@pytest.mark.parametrize(("method", "compared"), [("awq", False), ("fp8", True)])
def test_quantized_weights_have_shapes_of_their_own_unless_they_are_float8(method: str, compared: bool, model: Path):
    configure(model, vocab_size=11, quantization_config={"quant_method": method})
    assert ("differ from config.json" in problems(model)) is compared


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "2"}, "config.json: num_hidden_layers: expected a number above 0, found '2'"),
        ({"num_attention_heads": None}, "num_attention_heads: expected a number above 0, found None"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a number above 0, found 0"),
        ({"rope_theta": "x"}, "rope_theta: expected a number above 0, found 'x'"),
    ],
)
def test_numbers_of_a_config_that_are_none(model: Path, changes: dict[str, object], message: str):
    configure(model, **changes)
    assert message in problems(model)


def test_an_index_without_a_table_is_no_index(model: Path):
    (model / "model.safetensors.index.json").write_text('{"weight_map": []}')
    assert problems(model) == ""
