"""Weights in float8: nearest values, whole blocks, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_async.types import JsonObject
from miles_async.weights import fp8
from miles_async.weights.staging import Staging
from miles_async.weights.staging_options import StagingOptions
from tests.unit.weights.test_staging import read, stage

E4M3 = sorted(
    sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    for sign in (-1, 1)
    for exponent in range(16)
    for mantissa in range(8)
    if (exponent, mantissa) != (15, 7)  # NaN
)
"""All finite values of the format, by its definition (OCP, 8-bit floating point, 2023)."""


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=draw) * torch.randn(rows, 1, generator=draw).exp()


@pytest.mark.parametrize("shape", [(128, 128), (300, 70), (5, 513), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_element_is_the_nearest_multiple_of_its_blocks_scale(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weights = matrix(*shape).to(dtype)
    values, scales = fp8.quantize(weights)
    assert (values.shape, values.dtype) == (shape, torch.float8_e4m3fn)
    assert (scales.shape, scales.dtype) == ((-(-shape[0] // 128), -(-shape[1] // 128)), torch.float32)
    exact, found = weights.double().numpy(), values.double().numpy()
    table = np.array(E4M3)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = np.s_[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            scale = np.abs(exact[block]).max() / 448
            np.testing.assert_allclose(scales[row, column].item(), scale, rtol=1e-7)
            wanted = exact[block].ravel() / scale
            nearest = np.abs(table[:, None] - wanted).min(axis=0)
            np.testing.assert_allclose(np.abs(found[block].ravel() - wanted), nearest, atol=1e-4)


def test_what_is_quantized_can_be_copied_as_it_lies_and_is_no_part_of_training() -> None:
    for tensor in fp8.quantize(matrix(130, 200).requires_grad_()):
        assert tensor.is_contiguous()
        assert not tensor.requires_grad


def dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return values.float() * torch.kron(scales, torch.ones(128, 128))[: len(values), : values.shape[1]]


def test_what_engines_multiply_with_is_near_the_weights() -> None:
    """Half a step of three bits is a sixteenth of an element; small ones are off by half of the smallest step."""
    weights = matrix(257, 130)
    values, scales = fp8.quantize(weights)
    floor = dequantized(torch.full_like(weights, 2.0**-10), scales)
    assert bool(((dequantized(values, scales) - weights).abs() <= (weights.abs() / 16).maximum(floor) * 1.0001).all())


def test_weights_that_were_quantized_once_stay_the_same() -> None:
    """Read from float8 and trained in bf16, they go back to engines as they were."""
    values, scales = fp8.quantize(matrix(256, 256))
    again, again_scales = fp8.quantize(dequantized(values, scales).bfloat16())
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    torch.testing.assert_close(again_scales, scales, rtol=2**-8, atol=0)


@pytest.mark.parametrize("element", [0.0, 1e-44, -1e-44])
def test_blocks_without_a_scale_are_zero(element: float) -> None:
    matrix = torch.zeros(4, 200)
    matrix[0, [0, 150]] = element
    values, scales = fp8.quantize(matrix)
    assert not values.float().any()
    assert scales.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("layer", [
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")),
    *(f"mlp.{part}{name}_proj" for part in ("", "experts.1.", "shared_experts.") for name in ("gate", "up", "down")),
    *(f"block_sparse_moe.experts.1.{name}" for name in ("w1", "w2", "w3")),
])  # fmt: skip
def test_matrices_that_engines_hold_in_float8(layer: str) -> None:
    """SGLang (0.5.23) has float8 parameters for all matrices of layers but routers and those that CONFIG names."""
    assert fp8.is_quantized(f"model.layers.0.{layer}.weight")
    assert not fp8.is_quantized(f"model.layers.0.{layer}.bias")


def test_engines_are_told_what_is_not_quantized() -> None:
    assert fp8.CONFIG["weight_block_size"] == [128, 128]
    assert fp8.CONFIG["modules_to_not_convert"] == ["kv_b_proj"]
    assert not fp8.is_quantized("model.layers.0.self_attn.kv_b_proj.weight")


def test_only_matrices_of_layers_are_quantized_and_their_scales_follow() -> None:
    plain = {
        "model.embed_tokens.weight": matrix(8, 4),
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(4),
        "model.layers.0.self_attn.q_norm.weight": torch.ones(4),
        "model.layers.0.self_attn.kv_b_proj.weight": matrix(4, 4),
        "model.layers.0.mlp.gate.weight": matrix(4, 4),
        "lm_head.weight": matrix(8, 4),
    }
    quantized = {
        "model.layers.0.self_attn.q_proj.weight": matrix(4, 4),
        "model.layers.0.mlp.experts.11.down_proj.weight": matrix(4, 4),
        "model.layers.0.block_sparse_moe.experts.3.w2.weight": matrix(4, 4),
    }
    found = list(fp8.quantized((plain | quantized).items()))
    names = [*plain, *(each for name in quantized for each in (name, f"{name}_scale_inv"))]
    assert [name for name, _ in found] == names
    assert all(tensor is plain[name] for name, tensor in found if name in plain)
    assert {tensor.dtype for name, tensor in found if name in quantized} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("senders", [1, 2])
def test_what_is_staged_is_quantized_and_each_senders_share_whole(senders: int, tmp_path: Path) -> None:
    # covers: C8
    weights = [(f"layers.{n}.mlp.{kind}_proj.weight", matrix(130, 20, n)) for n in range(4) for kind in ("up", "down")]
    expected = dict(fp8.quantized(weights))
    found = {}
    for sender in range(senders):
        options = StagingOptions(parent=tmp_path, bucket_bytes=6000, sender=sender, senders=senders, quantization="fp8")
        staging = Staging(options)
        found |= read(stage(staging, 0, weights))
        staging.close()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in expected)


ONE_RANK = {"attention": 1, "dense": 1, "experts": 1, "shared_experts": 1}
DENSE: JsonObject = {
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 2, "vocab_size": 1000, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = DENSE | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MINIMAX = DENSE | {"num_local_experts": 256, "num_experts_per_tok": 8}  # whose intermediate_size is the experts'
LATENT = DENSE | {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "head_dim": 60,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "ranks", "named"),
    [
        (DENSE, {"attention": 8, "dense": 8}, []),
        (DENSE, {"attention": 16, "dense": 8}, []),  # of 8 heads of keys each rank has one
        (
            DENSE | {"head_dim": 64, "num_attention_heads": 64},
            {"attention": 16},
            ["num_key_value_heads × head_dim of config.json leaves 64"],
        ),
        (DENSE | {"num_key_value_heads": None}, {"attention": 8}, []),
        (DENSE | {"num_key_value_heads": None, "head_dim": 64}, {"attention": 8}, []),  # two heads of each on a rank
        (DENSE | {"head_dim": None}, {}, []),
        (DENSE | {"head_dim": None}, {"attention": 16}, ["num_attention_heads × head_dim", "_heads × head_dim"]),
        (DENSE, {"dense": 16}, ["intermediate_size of config.json leaves 192"]),
        (DENSE | {"head_dim": 64}, {"attention": 8}, ["num_key_value_heads × head_dim of config.json leaves 64"]),
        (DENSE | {"num_attention_heads": 24}, {"attention": 32, "dense": 8}, ["num_attention_heads × head_dim"]),
        (EXPERTS, {"experts": 2}, []),
        (EXPERTS, {"experts": 4}, ["moe_intermediate_size of config.json leaves 192"]),
        (DENSE | {"hidden_size": 960}, {}, ["hidden_size of config.json leaves 960"]),
        (EXPERTS, {"dense": 16}, []),  # it has no dense layers
        (EXPERTS | {"first_k_dense_replace": 1}, {"dense": 16}, ["intermediate_size of config.json leaves 192"]),
        (MINIMAX, {"experts": 4}, []),
        (MINIMAX, {"experts": 16}, ["intermediate_size of config.json leaves 192"]),
        (EXPERTS | {"n_shared_experts": 1}, {"shared_experts": 4}, ["n_shared_experts × moe_intermediate_size"]),
        (LATENT, {"attention": 8}, []),
        (LATENT | {"q_lora_rank": None}, {}, []),
        (LATENT | {"q_lora_rank": 192}, {}, ["q_lora_rank of config.json leaves 192"]),
        (LATENT | {"v_head_dim": 64}, {"attention": 8}, []),
        (
            LATENT | {"v_head_dim": 64},
            {"attention": 16},
            ["× v_head_dim of", "qk_rope_head_dim) of config.json leaves 192"],
        ),
        (LATENT, {"attention": 16}, ["(qk_nope_head_dim + qk_rope_head_dim) of config.json leaves 192"]),
        (LATENT | {"num_attention_heads": 2, "qk_rope_head_dim": 40}, {}, []),  # one rank holds the whole matrix
    ],
)
def test_engines_hold_whole_blocks(config: JsonObject, ranks: Mapping[str, int], named: list[str]) -> None:
    found = list(fp8.shape_problems(config, **(ONE_RANK | ranks)))
    assert len(found) == len(named)
    assert all(text in problem for text, problem in zip(named, found, strict=True))


def test_bytes_of_a_version() -> None:
    """Sizes of Qwen3-0.6B: its 155 M elements of embedding stay in bf16, and the others take one byte each."""
    config = DENSE | {"num_hidden_layers": 28, "vocab_size": 151_936}
    elements, embedding = 596_049_920, 151_936 * 1024
    assert fp8.published_bytes(config, elements, item=2, quantization="none") == 2 * elements
    found = fp8.published_bytes(config, elements, item=2, quantization="fp8")
    assert found == pytest.approx(2 * embedding + (elements - embedding) * (1 + 4 / 128**2), abs=1)
    untied = fp8.published_bytes(config | {"tie_word_embeddings": False}, elements, item=2, quantization="fp8")
    assert untied - found == pytest.approx(embedding * (1 - 4 / 128**2), abs=1)
    assert fp8.published_bytes({}, 10, item=2, quantization="fp8") == 20  # sizes unknown: as if nothing were quantized
