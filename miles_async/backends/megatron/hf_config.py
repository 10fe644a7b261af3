"""Refuses Hugging Face configs that would be trained wrongly, before anything starts.

Bridge 0.3 and the host layer spec get some configs silently wrong (logits differ although the export is clean;
measured against transformers). Each is refused here with the field of config.json that is the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from arguments.model import ModelArguments
from miles_async.errors import ConfigurationError

# The constants of megatron-core's llama3 rope scaling (RotaryEmbedding._apply_scaling).
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory. Raises ConfigurationError."""
    path = directory / "config.json"
    if not path.is_file():
        what = "has no config.json" if directory.is_dir() else "does not exist"
        raise ConfigurationError(f"--hf-checkpoint {directory}: the directory {what}; expected a Hugging Face model")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def check_model(config: Mapping[str, Any], directory: Path) -> None:
    """Raises ConfigurationError naming every field that would make training silently wrong."""
    problems = list(_problems(config))
    if problems:
        raise ConfigurationError(f"{directory / 'config.json'} cannot be trained correctly: " + "; ".join(problems))


def check_layout(config: Mapping[str, Any], model: ModelArguments, world_size: int) -> None:
    """The model can be split as the flags say. Raises ConfigurationError."""
    tensor, pipeline = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    if tensor < 1 or pipeline < 1 or world_size % (tensor * pipeline):
        raise ConfigurationError(
            f"{world_size} trainer ranks are not a multiple of --tensor-model-parallel-size {tensor} × "
            f"--pipeline-model-parallel-size {pipeline}; change these or --actor-num-gpus-per-node"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        count = config.get(name)
        if count is not None and count % tensor:
            raise ConfigurationError(f"--tensor-model-parallel-size {tensor} does not divide {name} {count}")
    layers = config.get("num_hidden_layers")
    if layers is not None and layers % pipeline:
        raise ConfigurationError(
            f"--pipeline-model-parallel-size {pipeline} does not divide num_hidden_layers {layers}"
        )


def rope_theta(config: Mapping[str, Any]) -> float:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` (4). Raises ConfigurationError if absent."""
    theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, int | float):
        raise ConfigurationError("config.json: expected rope_parameters.rope_theta (or rope_theta), found neither")
    return float(theta)


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    kind = config.get("model_type", "")
    yield from _rope_problems(config)
    yield from _expert_problems(config, kind)
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    if windowed or "sliding_attention" in (config.get("layer_types") or ()):
        yield "sliding_window: attention would span the whole sequence"
    if config.get("attention_bias"):
        yield "attention_bias true: biases would be dropped"
    if config.get("mlp_bias"):
        yield "mlp_bias true: biases would be dropped"


def _rope_problems(config: Mapping[str, Any]) -> Iterator[str]:
    rope = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        yield "rope_parameters per layer type: one rotary base is used for all layers"
        return
    scaling = config.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3":
        for name, expected in LLAMA3_ROPE.items():
            if scaling.get(name, expected) != expected:
                yield f"rope scaling llama3 with {name} {scaling[name]}: only {expected} is implemented"
    elif kind not in (None, "default"):
        yield f"rope scaling {kind!r}: positions would be rotated wrongly"
    if (config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        yield "partial_rotary_factor: not verified"


def _expert_problems(config: Mapping[str, Any], kind: str) -> Iterator[str]:
    if not (config.get("num_experts") or config.get("num_local_experts")):
        return
    # transformers leaves norm_topk_prob out of config.json when it has its default: False for qwen*_moe.
    if "moe" in kind and not config.get("norm_topk_prob", False):
        yield "norm_topk_prob false: router weights would be normalised all the same"
    if config.get("decoder_sparse_step", 1) != 1:
        yield "decoder_sparse_step other than 1: every layer would get experts"
    if config.get("mlp_only_layers"):
        yield "mlp_only_layers: every layer would get experts"
