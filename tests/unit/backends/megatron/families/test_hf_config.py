"""Configs that would be trained wrongly without a sign of it are refused, with the field that is the reason."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_async.arguments.model import ModelArguments, num_experts
from miles_async.backends.megatron.families import hf_config
from miles_async.backends.megatron.families.layout import check_layout
from miles_async.backends.megatron.families.provider_fields import provider_fields
from miles_async.errors import ConfigurationError

QWEN3 = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "attention_bias": False,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "sliding_window": None,
    "use_sliding_window": False,
}
FLOAT8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MOE = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": []}
GEMMA = QWEN3 | {"model_type": "gemma", "hidden_act": "gelu"}
MISTRAL = {name: value for name, value in QWEN3.items() if name != "use_sliding_window"} | {"model_type": "mistral"}
GEMMA3 = QWEN3 | {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "use_sliding_window": True,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
    },
}
GEMMA4 = GEMMA3 | {  # as it is published
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "use_bidirectional_attention": "vision",
    "rope_parameters": {
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25},
    },
}
QWEN3_NEXT = MOE | {
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 6,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
}
OLMOE = QWEN3 | {"model_type": "olmoe", "num_experts": 4, "num_key_value_heads": 4, "clip_qkv": None}
GPT_OSS = QWEN3 | {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "num_local_experts": 4,
    "intermediate_size": 6,
    "use_sliding_window": True,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
}
MINIMAX_M2 = QWEN3 | {  # as it is published
    "model_type": "minimax_m2",
    "head_dim": 128,
    "rotary_dim": 64,
    "num_local_experts": 4,
    "num_key_value_heads": 2,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "rope_parameters": None,
    "rope_theta": 5e6,
}
NEMOTRON_H = QWEN3 | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*-ME",
    "num_hidden_layers": 5,
    "mamba_num_heads": 8,
    "n_groups": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 6,
}
GLM5 = QWEN3 | {"model_type": "glm_moe_dsa", "n_routed_experts": 4, "kv_lora_rank": 16, "indexer_rope_interleave": True}
FLASH = QWEN3 | {"model_type": "glm4_moe_lite", "n_routed_experts": 4, "kv_lora_rank": 16}  # the router's by default
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 5e5,
}


@pytest.mark.parametrize(
    "config",
    [
        QWEN3,
        MOE,
        QWEN3 | {"rope_parameters": LLAMA3_ROPE},
        QWEN3 | {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": None},  # written by transformers 4
        QWEN3 | {"sliding_window": 4096},  # there, but switched off
        GEMMA,
        MISTRAL,
        QWEN3_NEXT,
        {name: value for name, value in QWEN3_NEXT.items() if name != "norm_topk_prob"},
        {name: value for name, value in QWEN3_NEXT.items() if name != "norm_topk_prob"}
        | {"model_type": "qwen3_5_moe_text"},
        OLMOE,
        OLMOE | {"norm_topk_prob": False},
        GPT_OSS,
        NEMOTRON_H,
        NEMOTRON_H | {"n_groups": 4, "mamba_n_groups": 4},
        FLASH,
        GLM5 | {"indexer_types": ["full", "full"], "index_topk_freq": 1},
        MINIMAX_M2,
        MINIMAX_M2 | {"rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}},  # by transformers 5
        GEMMA4,
        GEMMA4 | {"per_layer_config": {"1": {"head_dim": 512, "num_key_value_heads": 2}}},  # by transformers 5.19
        GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        GEMMA3,
        GEMMA3 | {"rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4},  # by transformers 4
        QWEN3 | {"quantization_config": FLOAT8},
        QWEN3 | {"quantization_config": FLOAT8 | {"activation_scheme": "dynamic", "weight_block_size": [64, 32]}},
    ],
)
def test_verified_configs_pass(config: dict[str, object]) -> None:
    hf_config.check_model(config, Path("model"))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (MOE | {"norm_topk_prob": False}, "norm_topk_prob"),
        ({k: v for k, v in MOE.items() if k != "norm_topk_prob"}, "norm_topk_prob"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (MOE | {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (QWEN3 | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        (QWEN3 | {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "linear"),
        (QWEN3 | {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 4096}}, "original_max"),
        (QWEN3 | {"sliding_window": 128, "use_sliding_window": True}, "sliding_window"),
        (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        (QWEN3 | {"attention_bias": True}, "attention_bias"),
        (QWEN3 | {"mlp_bias": True}, "mlp_bias"),
        (QWEN3_NEXT | {"full_attention_interval": 4}, "layer_types other than full_attention in every layer 4"),
        (QWEN3_NEXT | {"full_attention_interval": None}, "full_attention_interval is absent"),
        (QWEN3_NEXT | {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor 0.25: .* write it there"),
        (QWEN3_NEXT | {"rope_theta": 1e6}, "rope_parameters.rope_theta 10000.0: .* write it there"),
        (QWEN3_NEXT | {"attn_output_gate": False}, "attn_output_gate false"),
        (GEMMA | {"tie_word_embeddings": False}, "tie_word_embeddings"),
        (MOE | {"tie_word_embeddings": True}, "tie_word_embeddings true"),
        (GEMMA | {"hidden_act": "silu"}, "hidden_act"),
        (OLMOE | {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        (OLMOE | {"num_key_value_heads": 2}, "num_key_value_heads"),
        ({k: v for k, v in NEMOTRON_H.items() if k != "hybrid_override_pattern"}, "hybrid_override_pattern is absent"),
        (NEMOTRON_H | {"n_groups": 4}, "n_groups 4: .* reads mamba_n_groups"),
        (NEMOTRON_H | {"use_bias": True}, "use_bias true"),
        (NEMOTRON_H | {"moe_latent_size": 4}, "moe_latent_size"),
        (GPT_OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
        (GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config mxfp4"),
        (QWEN3 | {"quantization_config": {"quant_method": "fp8"}}, "fp8: only fp8 with a weight_block_size is read"),
        (QWEN3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "only fp8 with"),
        (QWEN3 | {"quantization_config": FLOAT8 | {"quant_method": "mxfp8"}}, "quantization_config mxfp8"),
        (QWEN3 | {"quantization_config": FLOAT8 | {"activation_scheme": "static"}}, "only fp8 with"),
        (QWEN3 | {"text_config": {"quantization_config": {"quant_method": "awq"}}}, "quantization_config awq"),
        (GPT_OSS | {"hidden_size": 12}, "hidden_size of twice intermediate_size"),
        (MISTRAL | {"sliding_window": 4096}, "sliding_window: .* write null"),
        (GLM5 | {"indexer_rope_interleave": False}, "indexer_rope_interleave: expected true"),
        (GLM5 | {"index_topk_freq": 4}, "index_topk_freq or indexer_types"),
        (GLM5 | {"indexer_types": ["full", "shared"]}, "index_topk_freq or indexer_types"),
        (FLASH | {"norm_topk_prob": False}, "norm_topk_prob"),
        (MINIMAX_M2 | {"use_qk_norm": False}, "use_qk_norm: expected true"),
        (MINIMAX_M2 | {"scoring_func": "softmax"}, 'scoring_func: expected "sigmoid"'),
        ({k: v for k, v in MINIMAX_M2.items() if k != "use_routing_bias"}, "use_routing_bias: expected true"),
        (MINIMAX_M2 | {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rotary_dim: expected 32"),
        ({k: v for k, v in MINIMAX_M2.items() if k != "rotary_dim"}, "rotary_dim: expected 128"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3 | {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope scaling 'yarn' of full_att"),
        (GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "of sliding_attention"),
        (GEMMA4 | {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256: .* use a model without"),
        ({k: v for k, v in GEMMA4.items() if k != "hidden_size_per_layer_input"}, "hidden_size_per_layer_input 256"),
        (GEMMA4 | {"num_kv_shared_layers": 1}, "num_kv_shared_layers 1"),
        (GEMMA4 | {"per_layer_config": {"0": {"head_dim": 512}}}, "per_layer_config: expected the same"),
        (GEMMA4 | {"per_layer_config": {"1": {"intermediate_size": 512}}}, "per_layer_config with intermediate_size"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (
            GEMMA4 | {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            "rope scaling 'linear' of full_att",
        ),
        (GEMMA3 | {"model_type": "qwen3", "layer_types": None, "sliding_window": None}, "one rotary base"),
    ],
)
def test_silently_wrong_configs_are_refused(config: dict[str, object], field: str) -> None:  # covers: M21
    with pytest.raises(ConfigurationError, match=field):
        hf_config.check_model(config, Path("model"))


def test_a_family_that_is_not_trained_is_refused_with_the_reason_and_what_to_do() -> None:  # covers: M21
    with pytest.raises(
        ConfigurationError, match=r"'gemma3' is not trained: .* use one of the text model.*mistral.*docs"
    ):
        hf_config.check_model(QWEN3 | {"model_type": "gemma3"}, Path("model"))
    with pytest.raises(ConfigurationError, match="'bloom' is not trained: it was not compared with transformers"):
        hf_config.check_model(QWEN3 | {"model_type": "bloom"}, Path("model"))


MIXTURE = MOE | {"moe_intermediate_size": 6}
MAMBA = NEMOTRON_H | {"n_groups": 2, "num_attention_heads": 8, "hybrid_override_pattern": "M*-E"}
ADAPTED_EXPERTS = {"lora_rank": 4, "target_modules": ("gate_proj", "up_proj", "down_proj")}


@pytest.mark.parametrize(
    ("config", "layout", "world_size", "message"),
    [
        (QWEN3, {"tensor_model_parallel_size": 2}, 3, "3 trainer ranks"),
        (QWEN3, {"context_parallel_size": 2}, 3, "--context-parallel-size 2"),
        (QWEN3, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}, 2, "does not divide"),
        (QWEN3, {"pipeline_model_parallel_size": 4}, 4, "num_hidden_layers 2"),
        (QWEN3, {"tensor_model_parallel_size": 0}, 1, "--tensor-model-parallel-size 0"),
        (QWEN3, {"expert_model_parallel_size": 2}, 2, "model_type 'qwen3'.* has no experts"),
        (QWEN3, {"expert_tensor_parallel_size": 2}, 2, "has no experts"),
        (QWEN3, {"freeze_vision_tower": True}, 1, "--freeze-vision-tower: model_type 'qwen3' has none"),
        (MIXTURE, {"expert_model_parallel_size": 3}, 3, "--expert-model-parallel-size 3 does not divide 4 experts"),
        (MIXTURE, {"expert_tensor_parallel_size": 4}, 4, "does not divide moe_intermediate_size 6"),
        (MIXTURE, {"expert_model_parallel_size": 2}, 3, "3 trainer ranks"),
        (MIXTURE, {"expert_tensor_parallel_size": 2}, 3, "3 trainer ranks"),
        (MIXTURE, {"tensor_model_parallel_size": 2, "sequence_parallel": False}, 2, "--no-sequence-parallel"),
        (GPT_OSS, {"tensor_model_parallel_size": 2}, 2, "splits experts of model_type 'gpt_oss' in the wrong places"),
        (GPT_OSS, {"lora_rank": 4}, 1, "--lora-rank: adapters of model_type 'gpt_oss'"),
        (GPT_OSS, {"expert_tensor_parallel_size": 4}, 4, "does not divide intermediate_size 6"),
        (MINIMAX_M2, {"tensor_model_parallel_size": 4}, 4, "expected at most num_key_value_heads 2"),
        (MIXTURE, ADAPTED_EXPERTS | {"expert_model_parallel_size": 2}, 2, "with adapters on experts alone"),
        (
            MIXTURE,
            ADAPTED_EXPERTS | {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            2,
            "with adapters on experts alone",
        ),
        (MAMBA, {"tensor_model_parallel_size": 4}, 16, "tensor-model-parallel-size 4 .* does not split n_groups 2"),
        (MAMBA, {"context_parallel_size": 16}, 16, "parallel-size 16 does not divide mamba_num_heads 8"),
        (MAMBA, {"share_prefixes": True}, 1, "--share-prefixes: not there for layers of Mamba-2"),
        (
            MAMBA,
            {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
            2,
            "virtual-.*: not there",
        ),
        (MAMBA, {"enable_mtp_training": True}, 1, "--enable-mtp-training: .* of model_type .nemotron_h. were not"),
        (
            QWEN3_NEXT,
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
            4,
            "size 4 does not divide linear_num_key_heads 2",
        ),
        (QWEN3_NEXT, {"share_prefixes": True}, 1, "--share-prefixes: .* reads a sample's tokens one after the other"),
        (QWEN3_NEXT, {"enable_mtp_training": True}, 1, "--enable-mtp-training: .* 'qwen3_next' were not compared"),
        (
            QWEN3_NEXT,
            {"megatron_extra": ("--deterministic-mode",)},
            1,
            "--deterministic-mode: .* no deterministic linear attention",
        ),
        (QWEN3_NEXT, {"lora_rank": 4}, 1, "--lora-rank: adapters of model_type 'qwen3_next'"),
    ],
)
def test_impossible_layouts_are_refused(
    config: dict[str, object], layout: dict[str, object], world_size: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_layout(config, ModelArguments(**layout), world_size)


def test_adapters_of_experts_are_trained_beside_others() -> None:
    split = {"expert_model_parallel_size": 2}
    check_layout(MIXTURE, ModelArguments(**ADAPTED_EXPERTS), 2)
    check_layout(MIXTURE, ModelArguments(**split, lora_rank=4, target_modules=("linear_fc1", "linear_proj")), 2)
    check_layout(MIXTURE | {"n_shared_experts": 1}, ModelArguments(**split, **ADAPTED_EXPERTS), 2)


def test_only_models_with_mixtures_have_experts() -> None:
    assert num_experts(GEMMA4 | {"num_experts": 4}) == 0
    assert num_experts(GEMMA4 | {"num_experts": 4, "enable_moe_block": True}) == 4
    assert num_experts(NEMOTRON_H) == 4
    assert num_experts(NEMOTRON_H | {"hybrid_override_pattern": "M*-"}) == 0


def test_heads_of_every_kind_of_layer_are_split() -> None:
    check_layout(GEMMA4 | {"num_key_value_heads": 4}, ModelArguments(tensor_model_parallel_size=4), 4)
    with pytest.raises(ConfigurationError, match="num_key_value_heads 3 nor is a multiple"):
        check_layout(GEMMA4 | {"num_global_key_value_heads": 3}, ModelArguments(tensor_model_parallel_size=2), 2)


def test_layers_for_multi_token_prediction_are_trained_where_they_are_known() -> None:
    asked, one = ModelArguments(enable_mtp_training=True), {"num_nextn_predict_layers": 1}
    deepseek = MIXTURE | one | {"model_type": "deepseek_v3"}
    check_layout(deepseek, asked, 1)
    for config, message in (
        (MIXTURE | {"model_type": "deepseek_v3"}, "found no num_nextn_predict_layers in config.json"),
        (
            MIXTURE | one,
            "of model_type 'qwen3_moe' were not compared .* use a model of glm4_moe, glm4_moe_lite, deepseek",
        ),
        (deepseek | {"tie_word_embeddings": True}, "tie_word_embeddings true"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            check_layout(config, asked, 1)


@pytest.mark.parametrize(("heads", "tensor", "possible"), [(2, 4, True), (4, 2, True), (3, 2, False), (2, 3, False)])
def test_ranks_and_heads_of_keys_divide_one_way_or_the_other(heads: int, tensor: int, possible: bool) -> None:
    config = QWEN3 | {"num_attention_heads": 12, "num_key_value_heads": heads, "intermediate_size": 12}
    config["vocab_size"] = 12
    refused = pytest.raises(ConfigurationError, match=f"num_key_value_heads {heads}")
    with contextlib.nullcontext() if possible else refused:
        check_layout(config, ModelArguments(tensor_model_parallel_size=tensor), tensor)


def test_every_problem_of_a_layout_is_said_at_once() -> None:
    model = ModelArguments(tensor_model_parallel_size=8, share_prefixes=True, lora_rank=4, sequence_parallel=False)
    config = QWEN3_NEXT | {"num_experts": 4, "moe_intermediate_size": 6}
    with pytest.raises(ConfigurationError) as refusal:
        check_layout(config, model, 8)
    for part in ("num_attention_heads 4", "--share-prefixes", "--lora-rank", "size 6", "--no-sequence-parallel"):
        assert part in str(refusal.value)


def test_possible_layouts_pass() -> None:
    split = ModelArguments(tensor_model_parallel_size=2, expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    check_layout(MIXTURE, split, 8)
    both = ModelArguments(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    check_layout(QWEN3, both, 8)
    check_layout(MAMBA, ModelArguments(tensor_model_parallel_size=2, context_parallel_size=4), 8)
    check_layout(QWEN3_NEXT, ModelArguments(tensor_model_parallel_size=2), 2)


def test_missing_or_broken_config_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        hf_config.read_config(tmp_path / "absent")
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        hf_config.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="not JSON"):
        hf_config.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert hf_config.read_config(tmp_path) == QWEN3


def test_config_of_an_export_says_the_dtype_of_its_weights() -> None:
    older = {"torch_dtype": "bfloat16", "hidden_size": 8}
    assert hf_config.with_dtype(older, "float32") == {"torch_dtype": "float32", "hidden_size": 8}
    assert hf_config.with_dtype({"hidden_size": 8}, "bfloat16") == {"dtype": "bfloat16", "hidden_size": 8}


def test_an_exported_config_says_nothing_of_quantization() -> None:
    fields = {"hidden_size": 8, "dtype": "float32"}
    quantized = fields | {"quantization_config": FLOAT8}
    assert hf_config.with_dtype(quantized, "float32") == fields
    nested = quantized | {"text_config": quantized, "vision_config": fields}
    expected = fields | {"text_config": fields, "vision_config": fields}
    assert hf_config.with_dtype(nested, "float32") == expected


QWEN25_VL = {  # as it is published: fields of the language model at the top
    **{name: value for name, value in QWEN3.items() if name != "rope_parameters"},
    "model_type": "qwen2_5_vl",
    "sliding_window": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"depth": 2},
    "image_token_id": 60,
}
QWEN3_VL = QWEN25_VL | {
    "model_type": "qwen3_vl",
    "sliding_window": None,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}

QWEN3_VL_MOE = QWEN3_VL | {
    "model_type": "qwen3_vl_moe",
    "hidden_size": 64,
    "num_experts": 4,
    "moe_intermediate_size": 48,
}


def nested(config: dict[str, object]) -> dict[str, object]:
    """As transformers 5 writes it, and as Qwen3-VL is published."""
    outside = ("model_type", "vision_config", "image_token_id")
    inner = {name: value for name, value in config.items() if name not in outside} | {"model_type": "qwen2_5_vl_text"}
    return {name: config[name] for name in outside} | {"text_config": inner}


@pytest.mark.parametrize("written", [lambda config: config, nested])
def test_fields_of_a_vision_language_model_are_checked_wherever_they_are(written: Callable[..., dict[str, object]]):
    hf_config.check_model(written(QWEN25_VL), Path("m"))
    assert provider_fields(written(QWEN25_VL))["mrope_section"] == [16, 24, 24]
    for change, reason in (
        ({"use_sliding_window": True}, "sliding_window"),
        ({"rope_scaling": {"type": "dynamic", "mrope_section": [16, 24, 24]}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": None}, "without mrope_section"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            hf_config.check_model(written(QWEN25_VL | change), Path("m"))
    with pytest.raises(ConfigurationError, match=r"--tensor-model-parallel-size 8 does not divide num_attention_heads"):
        check_layout(written(QWEN25_VL), ModelArguments(tensor_model_parallel_size=8), 8)


def test_positions_rotate_as_engines_rotate_them():
    lengths = provider_fields(nested(QWEN3_VL))["mrope_section"]
    rotating = [number % 3 for number, length in enumerate(lengths) for _ in range(length)]
    assert rotating == [0, 1, 2, 0, 1, 2, 0, 0]  # time, height, width
    hf_config.check_model(nested(QWEN3_VL), Path("m"))
    for config, other in ((QWEN3_VL, QWEN25_VL), (QWEN25_VL, QWEN3_VL)):
        with pytest.raises(ConfigurationError, match="mrope_interleaved: expected"):
            hf_config.check_model(config | {"rope_scaling": other["rope_scaling"]}, Path("m"))


def test_rollout_and_trainer_agree_on_which_models_read_images():
    """The rollout process goes by vision_config, the trainer by the family."""
    with pytest.raises(ConfigurationError, match=r"vision_config: images would be put .* 'qwen3' reads none"):
        hf_config.check_model(QWEN3 | {"vision_config": {}, "image_token_id": 60}, Path("m"))
    blind = {name: value for name, value in QWEN25_VL.items() if name != "vision_config"}
    with pytest.raises(ConfigurationError, match="vision_config is absent"):
        hf_config.check_model(blind, Path("m"))


def test_mixtures_that_read_images_are_refused_where_engines_would_read_them_otherwise():
    hf_config.check_model(nested(QWEN3_VL_MOE), Path("m"))
    for change, reason in (
        ({"vision_config": {"deepstack_visual_indexes": [8, 16]}}, "deepstack_visual_indexes: .* expects three"),
        ({"moe_intermediate_size": 64}, "square matrices"),
        ({"moe_intermediate_size": 32}, "square matrices"),
        ({"norm_topk_prob": False}, "norm_topk_prob false"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            hf_config.check_model(nested(QWEN3_VL_MOE | change), Path("m"))
    check_layout(nested(QWEN3_VL_MOE), ModelArguments(expert_model_parallel_size=2), 2)


@pytest.mark.parametrize("config", [QWEN25_VL, QWEN3_VL, QWEN3_VL_MOE])
@pytest.mark.parametrize(
    ("model", "flag"),
    [
        (ModelArguments(share_prefixes=True), "--share-prefixes"),
        (ModelArguments(megatron_extra=("--apply-rope-fusion",)), "--apply-rope-fusion"),
        (ModelArguments(megatron_extra=("--overlap-grad-reduce",)), "--overlap-grad-reduce"),
    ],
)
def test_flags_that_images_exclude_are_refused(config: dict[str, object], model: ModelArguments, flag: str):
    check_layout(config, ModelArguments(freeze_vision_tower=True), 2)
    with pytest.raises(ConfigurationError, match=f"^{flag}: "):
        check_layout(config, model, 2)


def test_language_models_with_images_have_adapters_but_for_mixtures():
    model = ModelArguments(lora_rank=4)
    for config in (QWEN25_VL, QWEN3_VL):
        check_layout(config, model, 1)
    with pytest.raises(ConfigurationError, match="--lora-rank: adapters of model_type 'qwen3_vl_moe'"):
        check_layout(QWEN3_VL_MOE, model, 1)


def test_features_of_the_vision_tower_are_needed_on_the_first_stage_alone():
    layers = {"num_hidden_layers": 8, "vision_config": {"deepstack_visual_indexes": [1, 2, 3]}}
    two, four = ModelArguments(pipeline_model_parallel_size=2), ModelArguments(pipeline_model_parallel_size=4)
    virtual = dataclasses.replace(two, num_virtual_stages_per_pipeline_rank=2)
    unequal = dataclasses.replace(four, decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=1)
    for config in (QWEN3_VL, QWEN3_VL_MOE):
        check_layout(config | layers, two, 4)
        check_layout(config | layers, unequal, 4)
        for model in (four, virtual):
            with pytest.raises(ConfigurationError, match=r"first \(virtual\) stage has 2 layers; expected 3 or more"):
                check_layout(config | layers, model, 4)
    check_layout(QWEN25_VL | {"num_hidden_layers": 8}, virtual, 4)
