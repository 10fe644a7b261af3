"""Tiny random Hugging Face models, large enough to tell right from wrong."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB = 64

_DENSE: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
# By default token 0 is padding, whose embedding transformers does not train.
_GEMMA = _DENSE | {"tie_word_embeddings": True, "num_key_value_heads": 4, "pad_token_id": None}
# More than ten experts: their numbers sort differently as text.
_MIXTURE = _DENSE | {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_SIGMOID_ROUTED = _MIXTURE | {
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
_ROPE_OF_GEMMA4 = {
    "sliding_attention": _DEFAULT_ROPE,
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 1.5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_READ_BY_SGLANG = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # and published
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 24,
}
# With few heads, scores of several tokens are 0: which of them are chosen is left to chance.
_INDEXED = {"n_group": 1, "topk_group": 1, "index_topk": 6, "index_head_dim": 16, "index_n_heads": 16}

_GEMMA4 = {name: value for name, value in _GEMMA.items() if name != "rope_theta"} | {
    "num_key_value_heads": 2,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": _ROPE_OF_GEMMA4,
    # Heads of layers without a window; what transformers writes holds them under per_layer_config.
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
}
_HYBRID_ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
_GATED_DELTA = {  # one gated delta net and one layer of attention, whose heads differ in number and size
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,  # the same, as SGLang reads it
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rope_parameters": _HYBRID_ROPE,
}
_GATED_DELTA_MIXTURE = _MIXTURE | _GATED_DELTA | {"num_experts": 12, "shared_expert_intermediate_size": 48}

_MAMBA = _DENSE | {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 4,
    "chunk_size": 8,
    "time_step_min": 1e-9,  # a bound of steps that transformers has; NVIDIA's code, SGLang and Megatron have none
}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", _DENSE | {"rope_parameters": _LLAMA3_ROPE, "max_position_embeddings": 16384}),
    # Not megatron's default rotary base: the bridge misses what transformers 5 writes.
    "qwen2": ("Qwen2", _DENSE | {"rope_theta": 1e6}),
    "qwen3": ("Qwen3", _DENSE | {"rope_theta": 5e5}),
    "qwen3-tied": ("Qwen3", _DENSE | {"tie_word_embeddings": True}),
    "mistral": ("Mistral", _DENSE | {"sliding_window": None}),
    "gemma2": (
        "Gemma2",
        _GEMMA
        | {"num_key_value_heads": 2, "sliding_window": 6, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 5.0}
        | {"hidden_act": "gelu_pytorch_tanh"},  # which SGLang reads, and published models have
    ),
    "gemma3": (
        "Gemma3Text",
        _GEMMA
        | {"num_key_value_heads": 2, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24}
        | {"rope_parameters": {"sliding_attention": _DEFAULT_ROPE, "full_attention": _LINEAR_ROPE}},
    ),
    "gemma4": ("Gemma4Text", _GEMMA4),
    "gemma4-moe": (
        "Gemma4Text",
        _GEMMA4
        | {"attention_k_eq_v": False, "enable_moe_block": True, "num_experts": 12, "top_k_experts": 2}
        | {"moe_intermediate_size": 32},
    ),
    "qwen3-moe": ("Qwen3Moe", _MIXTURE | {"num_experts": 12, "norm_topk_prob": True}),
    "qwen3-next": ("Qwen3Next", _GATED_DELTA_MIXTURE),
    "qwen3.5": ("Qwen3_5Text", _DENSE | _GATED_DELTA),
    "qwen3.5-moe": ("Qwen3_5MoeText", _GATED_DELTA_MIXTURE),
    "gemma": ("Gemma", _GEMMA),
    "glm4": (
        "Glm4",
        _DENSE | {"attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 2e4, "pad_token_id": None},
    ),
    "glm4-moe": ("Glm4Moe", _SIGMOID_ROUTED | {"use_qk_norm": True, "attention_bias": True, "n_shared_experts": 1}),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        _SIGMOID_ROUTED
        | _LATENT
        | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
        # with which transformers normalises latent vectors, whatever this field says
        | {"rms_norm_eps": 1e-6},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        _DENSE
        | {"intermediate_size": 32, "num_local_experts": 12, "num_experts_per_tok": 2, "rotary_dim": 8}
        | {"bos_token_id": 1, "eos_token_id": 2, "rope_theta": 5e6}
        # which SGLang reads, and published models have
        | {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        _SIGMOID_ROUTED
        | _LATENT
        | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "rope_parameters": _YARN}
        | _READ_BY_SGLANG,
    ),
    "nemotron-h": (
        "NemotronH",
        _MAMBA | {"layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"]},
    ),
    "nemotron-h-moe": (
        "NemotronH",
        _SIGMOID_ROUTED
        | _MAMBA
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_shared_experts": 1}
        | {"moe_shared_expert_intermediate_size": 48},
    ),
    "olmoe": (
        "Olmoe",
        _MIXTURE | {"intermediate_size": 32, "num_experts": 12, "num_key_value_heads": 4, "pad_token_id": None},
    ),
    "gpt-oss": (
        "GptOss",
        _DENSE
        | {"intermediate_size": 48, "num_local_experts": 12, "num_experts_per_tok": 2, "sliding_window": 6}
        | {"rope_parameters": _YARN_OF_GPT_OSS, "swiglu_limit": 0.2},
    ),
    "deepseek-v32": ("DeepseekV32", _SIGMOID_ROUTED | _LATENT | _INDEXED | {"rope_parameters": _YARN}),
    "glm5": (
        "GlmMoeDsa",
        _SIGMOID_ROUTED
        | _LATENT
        | _INDEXED
        | {"n_shared_experts": 1, "rms_norm_eps": 1e-6, "indexer_rope_interleave": True},
    ),
    "moonlight": ("DeepseekV3", _SIGMOID_ROUTED | _LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "kimi-k2": (
        "DeepseekV3",
        _SIGMOID_ROUTED
        | _LATENT
        | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "rope_parameters": _YARN}
        | _READ_BY_SGLANG,
    ),
}

MODEL_TYPES = {  # where names differ
    "qwen3-tied": "qwen3",
    "qwen3.5": "qwen3_5_text",
    "qwen3.5-moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4-moe": "gemma4_text",
    "nemotron-h-moe": "nemotron_h",
    "moonlight": "deepseek_v3",
    "glm5": "glm_moe_dsa",
}


def model_type(family: str) -> str:
    """``model_type`` of config.json."""
    return MODEL_TYPES.get(family, family.replace("-", "_"))


def save_tiny(family: str, directory: Path, *, seed: int = 0, dtype: str = "float32", **config: object) -> Path:
    """A model of ``FAMILIES``, its parameters and router biases shaken so that no two of them are alike.

    Router biases are in fp32 whatever ``dtype``, as in published checkpoints; decays of Mamba-2, as they are trained.
    """
    import torch
    import transformers

    name, settings = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, f"{name}Config")(**(settings | config))
        )
        biases = [buffer for buffer_name, buffer in model.named_buffers() if "correction_bias" in buffer_name]
        factors = [buffer for buffer_name, buffer in model.named_buffers() if "layer_scalar" in buffer_name]
        for tensor in (*model.parameters(), *biases, *factors):
            if tensor.ndim > 1:
                tensor.data.mul_(3)
            if tensor.ndim == 1 or not tensor.any():
                tensor.data.add_(0.1 * torch.randn_like(tensor))
    rounded = [tensor for tensor_name, tensor in model.named_parameters() if not tensor_name.endswith(".A_log")]
    for tensor in (*rounded, *factors):
        tensor.data = tensor.data.to(getattr(torch, dtype))
    model.save_pretrained(directory)
    path = directory / "config.json"
    written: dict[str, object] = {"model_type": model_type(family)}  # Kimi's is another
    if "full_attention_interval" in settings:  # SGLang reads what transformers leaves out
        written |= {name: _HYBRID_ROPE[name] for name in ("rope_theta", "partial_rotary_factor")}
    found = json.loads(path.read_text())
    if name == "NemotronH":  # as published, and as SGLang reads it
        kinds = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        written |= {
            "num_hidden_layers": len(found["layers_block_type"]),
            "hybrid_override_pattern": "".join(kinds[kind] for kind in found.pop("layers_block_type")),
            "mamba_n_groups": settings["n_groups"],
        }
    path.write_text(json.dumps(found | written))
    return directory


def save_with_ahead_layers(family: str, directory: Path, *, count: int = 1) -> tuple[Path, Path]:
    """A model of ``FAMILIES`` with ``count`` layers for multi-token prediction after its two, in files like those of
    DeepSeek-V3 and GLM-4.5, and the same as a deeper model: its further layers are those, of the same numbers.

    Copies of the embedding and the output layer stand beside each, as they were before the model's changed.
    """
    import torch
    from safetensors.torch import load_file, save_file

    deep = save_tiny(family, directory / "deep", num_hidden_layers=2 + count)
    own = directory / "with-ahead-layers"
    own.mkdir()
    config = json.loads((deep / "config.json").read_text())
    (own / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 2, "num_nextn_predict_layers": count, "mlp_layer_types": None})
    )
    tensors = load_file(deep / "model.safetensors")
    size = config["hidden_size"]
    draw = torch.Generator().manual_seed(1)
    for layer in range(2, 2 + count):
        for name, shape in (("enorm", (size,)), ("hnorm", (size,)), ("shared_head.norm", (size,))):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + 0.1 * torch.randn(shape, generator=draw)
        tensors[f"model.layers.{layer}.eh_proj.weight"] = 0.1 * torch.randn(size, 2 * size, generator=draw)
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 1
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, own / "model.safetensors")
    return own, deep


def save_tiny_qwen3(directory: Path, *, tied: bool, seed: int = 0, **config: object) -> Path:
    return save_tiny("qwen3-tied" if tied else "qwen3", directory, seed=seed, **({"rope_theta": 1e4} | config))


def split_files(directory: Path, files: int) -> None:
    """Deal the tensors of ``directory`` out to several files and an index, as large models are published."""
    from safetensors.torch import load_file, save_file

    whole = directory / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    weight_map = {name: names[number % files] for number, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
