"""Refuse Hugging Face configs that would be trained wrongly, before anything starts. With some configs, bridge 0.6 and
the host's layers silently compute wrong logits (measured against transformers) although the export is clean. Each is
refused here with the field of config.json that is the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from miles_async.arguments.model import LAYER_PATTERN, num_experts
from miles_async.arguments.model_files import language_fields
from miles_async.backends.megatron.families.float8_files import is_readable
from miles_async.backends.megatron.families.known import FAMILIES, REFUSED, Family
from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject

# The constants of megatron-core's llama3 rope scaling (RotaryEmbedding._apply_scaling).
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_config(directory: Path) -> JsonObject:
    """Read config.json of a Hugging Face directory. Raises ConfigurationError."""
    path = directory / "config.json"
    if not path.is_file():
        what = "has no config.json" if directory.is_dir() else "does not exist"
        raise ConfigurationError(f"--hf-checkpoint {directory}: the directory {what}; expected a Hugging Face model")
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def with_dtype(config: JsonObject, dtype: str) -> JsonObject:
    """Return the config with ``dtype`` as the dtype in which transformers and engines load the weights, unquantized."""
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]  # the latter is the older name
    return {**_unquantized(config), **dict.fromkeys(names, dtype)}


def _unquantized(config: JsonObject) -> JsonObject:
    kept = {name: value for name, value in config.items() if name != "quantization_config"}
    return kept | (
        {"text_config": _unquantized(kept["text_config"])} if isinstance(kept.get("text_config"), dict) else {}
    )


def check_model(config: JsonObject, directory: Path) -> None:
    """Raise ConfigurationError naming every field that would make training silently wrong."""
    try:
        problems = list(_problems(language_fields(config)))
    except ConfigurationError as error:  # of a family that is not trained
        raise ConfigurationError(f"{directory}/{error}") from None
    if problems:
        raise ConfigurationError(f"{directory / 'config.json'} cannot be trained correctly: " + "; ".join(problems))


def ahead_layers(config: JsonObject) -> int:
    """Number of layers for multi-token prediction in the checkpoint."""
    return config.get("num_nextn_predict_layers") or 0


def window(config: JsonObject) -> int | None:
    """Tokens that attention sees in layers with a sliding window, the token itself included; None without windows."""
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    return config["sliding_window"] if windowed else None


def is_latent(config: JsonObject) -> bool:
    """True for multi-head latent attention (DeepSeek)."""
    return "kv_lora_rank" in config


def rope_kind(config: JsonObject) -> str:
    """Name of the scaling of positions; "default" for none."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return scaling.get("rope_type", scaling.get("type")) or "default"


def mrope(config: JsonObject) -> JsonObject:
    """The scaling of positions with mrope_section: parts of half a head that the three numbers of a position rotate.

    Empty where a position is one number.
    """
    scalings = (config.get("rope_parameters"), config.get("rope_scaling"))
    return next((each for each in scalings if each and "mrope_section" in each), {})


def rotary_share(config: JsonObject) -> float:
    """Part of each head that positions rotate."""
    rope = config.get("rope_parameters") or {}
    return config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0


def family_of(config: JsonObject) -> Family:
    """Raise ConfigurationError if the family is not trained, with the reason."""
    kind = config.get("model_type", "")
    if kind not in FAMILIES:
        reason = REFUSED.get(kind, "it was not compared with transformers")
        raise ConfigurationError(
            f"config.json: model_type {kind!r} is not trained: {reason}. The families that are: {', '.join(FAMILIES)} "
            "(docs/families.md)"
        )
    return FAMILIES[kind]


def _problems(config: JsonObject) -> Iterator[str]:
    family, kind = family_of(config), config["model_type"]
    yield from _rope_problems(config, family)
    yield from _expert_problems(config, kind, family)
    yield from _layer_problems(config, family)
    if family.images and "vision_config" not in config:
        yield "vision_config is absent: images would be left out of prompts"
    if not family.images and "vision_config" in config:
        yield f"vision_config: images would be put into prompts, and model_type {kind!r} reads none; remove it"
    if family.images and not mrope(config):
        yield "rope_parameters without mrope_section: it is unknown what the positions of images rotate"
    elif family.images and bool(mrope(config).get("mrope_interleaved")) != family.interleaved_mrope:
        yield f"mrope_interleaved: expected {json.dumps(family.interleaved_mrope)}, or engines would rotate otherwise"
    if kind == "qwen3_vl_moe":
        yield from _vision_mixture_problems(config)
    if kind == "minimax_m2":
        yield from _minimax_problems(config)
    if kind == "gemma4_text":
        yield from _gemma4_problems(config)
    if family.state_space:
        yield from _state_space_problems(config)
    if kind == "glm_moe_dsa":
        yield from _indexer_problems(config)


def _minimax_problems(config: JsonObject) -> Iterator[str]:
    """Fields that SGLang reads and transformers does not write."""
    rotated = int(rotary_share(config) * config["head_dim"])
    expected = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
    if "rotary_dim" not in config or rotary_share(config) != 1.0:  # the published file has rotary_dim alone
        expected["rotary_dim"] = rotated
    for name, value in expected.items():
        if config.get(name) != value:
            yield f"{name}: expected {json.dumps(value)}, without which engines would compute something else"


def _vision_mixture_problems(config: JsonObject) -> Iterator[str]:
    if len(config.get("vision_config", {}).get("deepstack_visual_indexes", (0, 1, 2))) != 3:
        yield "deepstack_visual_indexes: SGLang 0.5.23 expects three"
    hidden, width = config.get("hidden_size"), config.get("moe_intermediate_size")
    if width and hidden in (width, 2 * width):
        yield (
            f"moe_intermediate_size {width} with hidden_size {hidden}: transformers 5 reads square matrices of experts "
            "as they lie, and SGLang transposed"
        )


def _gemma4_problems(config: JsonObject) -> Iterator[str]:
    if size := config.get("hidden_size_per_layer_input", 256):
        yield (
            f"hidden_size_per_layer_input {size}: embeddings that every layer adds (E2B, E4B) have no place in "
            "megatron-core's pipeline stages and were not compared; use a model without them (31B, 26B-A4B)"
        )
    if count := config.get("num_kv_shared_layers"):
        yield f"num_kv_shared_layers {count}: layers that take keys and values of another layer were not compared"
    kinds, layers = config.get("layer_types") or (), config.get("per_layer_config") or {}
    whole = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    changes = [layers[number] for number in sorted(layers, key=int)]
    if layers and ([*map(int, sorted(layers, key=int))] != whole or any(change != changes[0] for change in changes)):
        yield "per_layer_config: expected the same for all layers without a window and for no other"
    elif layers and not changes[0].keys() <= {"head_dim", "num_key_value_heads"}:
        yield f"per_layer_config with {', '.join(sorted(changes[0]))}: only sizes and numbers of heads may differ"


def _state_space_problems(config: JsonObject) -> Iterator[str]:
    """SGLang (0.5.23) reads fields of the published files; transformers 5 writes some of them under other names."""
    if LAYER_PATTERN not in config:
        yield f"{LAYER_PATTERN} is absent: SGLang 0.5.23 reads it; write a letter per layer, of M, *, - and E"
        return
    for name, read, default in (("n_groups", "mamba_n_groups", 8), ("conv_kernel", "mamba_d_conv", 4)):
        if config.get(name, default) != config.get(read, default):
            yield f"{name} {config[name]}: SGLang 0.5.23 reads {read}; write it there, too"
    for name, value in {"use_bias": False, "mamba_proj_bias": False, "use_conv_bias": True}.items():
        if config.get(name, value) is not value:
            yield f"{name} {json.dumps(config[name])}: Megatron's Mamba-2 layers have it otherwise"
    if config.get("moe_latent_size") is not None:
        yield "moe_latent_size: experts of a smaller width were not compared"


def _indexer_problems(config: JsonObject) -> Iterator[str]:
    if config.get("indexer_rope_interleave") is not True:
        yield "indexer_rope_interleave: expected true, with which transformers rotates the indexer's keys"
    if (config.get("index_topk_freq") or 1) != 1 or "shared" in (config.get("indexer_types") or ()):
        yield "index_topk_freq or indexer_types: layers that take the tokens of another layer were not compared"


def _layer_problems(config: JsonObject, family: Family) -> Iterator[str]:
    if (window(config) or "sliding_attention" in (config.get("layer_types") or ())) and not family.windows:
        yield (
            "sliding_window: attention would span the whole sequence, on engines or in training; if samples are no "
            "longer than the window, write null in its place"
        )
    if config.get("attention_bias") and not family.attention_bias:
        yield "attention_bias true: biases would be dropped"
    if family.linear_attention:
        yield from _linear_attention_problems(config)
    if family.every_head_with_keys and config.get("num_key_value_heads") != config.get("num_attention_heads"):
        yield "num_key_value_heads other than num_attention_heads: keys would be normalised with the wrong weights"
    if config.get("clip_qkv") is not None:
        yield f"clip_qkv {config['clip_qkv']}: queries, keys and values would not be clipped"
    if config.get("swiglu_alpha", 1.702) != 1.702:
        yield f"swiglu_alpha {config['swiglu_alpha']}: only 1.702 is implemented"
    if (quantization := config.get("quantization_config")) and not is_readable(quantization):
        yield (
            f"quantization_config {quantization.get('quant_method')}: only fp8 with a weight_block_size is read; write "
            "the checkpoint without quantization first"
        )
    if config.get("mlp_bias"):
        yield "mlp_bias true: biases would be dropped"
    if family.tied_only and not config.get("tie_word_embeddings", True):
        yield "tie_word_embeddings false: the output layer would be the embedding"
    if family.untied_only and config.get("tie_word_embeddings", False):
        yield "tie_word_embeddings true: SGLang 0.5.23 would generate with an output layer that nothing fills"
    if family.gelu:
        activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu"
        if activation not in ("gelu", "gelu_pytorch_tanh"):
            yield f"hidden_act {activation!r}: only gelu_pytorch_tanh is implemented"
    if config.get("use_bidirectional_attention", False) not in (None, False, "vision"):  # of images, which are not read
        yield "use_bidirectional_attention: attention would be causal"


def _linear_attention_problems(config: JsonObject) -> Iterator[str]:
    """Mostly fields that SGLang (0.5.23) reads where transformers 5 does not write them."""
    kinds, interval = config.get("layer_types"), config.get("full_attention_interval") or 0
    if kinds and not interval:
        yield "full_attention_interval is absent: SGLang 0.5.23 reads it; write every how many layers one has attention"
    elif kinds and any((kind == "full_attention") != (number % interval == 0) for number, kind in enumerate(kinds, 1)):
        yield f"layer_types other than full_attention in every layer {interval}: SGLang 0.5.23 serves no other"
    rope = config.get("rope_parameters") or {}
    names = {"partial_rotary_factor": 0.25} | ({"rope_theta": 1e4} if config["model_type"] == "qwen3_next" else {})
    for name, default in names.items():
        if name in rope and config.get(name, default) != rope[name]:
            yield f"rope_parameters.{name} {rope[name]}: SGLang 0.5.23 reads {name} outside of it; write it there, too"
    if config.get("attn_output_gate") is False:
        yield "attn_output_gate false: attention would be gated all the same"


def _rope_problems(config: JsonObject, family: Family) -> Iterator[str]:
    rope = config.get("rope_parameters") or {}
    if by_layer_type := {name: value for name, value in rope.items() if isinstance(value, dict)}:
        if not family.rope_per_layer_type:
            yield "rope_parameters per layer type: one rotary base is used for all layers"
        whole = ("proportional",) if config["model_type"] == "gemma4_text" else ("default", "linear")
        for name, value in by_layer_type.items():
            implemented = whole if name == "full_attention" else ("default",)
            if value.get("rope_type", "default") not in implemented:
                yield f"rope scaling {value['rope_type']!r} of {name}: positions would be rotated wrongly"
        return
    kind, scaling = rope_kind(config), config.get("rope_scaling") or rope
    if kind == "llama3":
        for name, expected in LLAMA3_ROPE.items():
            if scaling.get(name, expected) != expected:
                yield f"rope scaling llama3 with {name} {scaling[name]}: only {expected} is implemented"
    elif kind != "default" and not (kind == "yarn" and family.yarn) and not (kind == "mrope" and family.images):
        if not (kind == "linear" and family.rope_per_layer_type):
            yield f"rope scaling {kind!r}: positions would be rotated wrongly"
    if rotary_share(config) != 1.0 and not family.partial_rotation:
        yield "partial_rotary_factor: not verified"
    if is_latent(config) and not config.get("rope_interleave", True):
        yield "rope_interleave false: positions would be rotated wrongly"


def _expert_problems(config: JsonObject, kind: str, family: Family) -> Iterator[str]:
    if not num_experts(config):
        return
    # transformers leaves norm_topk_prob out of config.json when it has its default: False for qwen*_moe.
    always = kind in ("qwen3_5_moe_text", "qwen3_vl_moe") or kind.startswith("glm")
    normalized = config.get("norm_topk_prob", "moe" not in kind or always)
    if not normalized and not family.unscaled_router:
        yield "norm_topk_prob false: router weights would be normalised all the same"
    if config.get("decoder_sparse_step", 1) != 1:
        yield "decoder_sparse_step other than 1: every layer would get experts"
    if kind == "gpt_oss" and config.get("hidden_size") == 2 * config["intermediate_size"]:
        yield "hidden_size of twice intermediate_size: square gate_up_proj would be loaded transposed"
    if config.get("mlp_only_layers"):
        yield "mlp_only_layers: every layer would get experts"
    # transformers ranks groups by their 2 best experts, megatron by their num_experts_per_tok / topk_group best.
    if (config.get("n_group") or 1) > 1 and config["num_experts_per_tok"] // config["topk_group"] != 2:
        yield "n_group with num_experts_per_tok / topk_group other than 2: other groups of experts would be chosen"
