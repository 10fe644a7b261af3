"""Adapters (LoRA, DoRA): which layers get one, and what their flags mean together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from miles_async.arguments import Arguments, ModelArguments
from miles_async.arguments.model import ALL_LINEAR
from miles_async.arguments.problems import refusal
from miles_async.arguments.words import did_you_mean
from miles_async.errors import ConfigurationError
from miles_async.types import JsonObject

TARGETS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "linear_q_proj": (),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
"""Megatron's name of a layer → Hugging Face's names of the projections that it computes as one."""

MLP = ("linear_fc1", "linear_fc2")

PEFT_CONFIG = "adapter_config.json"
"""File of the peft library's adapters."""


def target_layers(words: Sequence[str]) -> tuple[str, ...]:
    """Megatron's names of the layers to adapt; ``words`` as given with ``--target-modules``, with or without commas.

    Raises ConfigurationError.

    >>> target_layers(["linear_qkv", "gate_proj,up_proj"])
    ('linear_qkv', 'linear_fc1')
    """
    names = [name for word in words for name in word.split(",") if name]
    if names == [ALL_LINEAR]:
        return tuple(TARGETS)
    projections = {name for parts in TARGETS.values() for name in parts}
    if unknown := [name for name in names if name not in projections and name not in TARGETS]:
        raise ConfigurationError(
            f"--target-modules: expected {ALL_LINEAR} or some of {', '.join((*TARGETS, *sorted(projections)))}, "
            f"found {', '.join(unknown)}{did_you_mean(unknown[0], (*TARGETS, *projections))}"
        )
    chosen = []
    for layer, parts in TARGETS.items():
        given = [part for part in parts if part in names]
        if given and len(given) < len(parts):
            raise ConfigurationError(
                f"--target-modules {' '.join(given)} without {' '.join(part for part in parts if part not in given)}: "
                f"Megatron computes them as one layer, {layer}, which has one adapter: name all of them"
            )
        if given or layer in names:
            chosen.append(layer)
    if not chosen:
        raise ConfigurationError(f"--target-modules is empty: expected {ALL_LINEAR} or names of layers")
    return tuple(chosen)


def check_adapters(arguments: Arguments) -> Iterator[str]:
    """Check adapter flags against each other and the layout of ranks."""
    model = arguments.model
    if not model.lora_rank:
        return
    yield from refusal(lambda: target_layers(model.target_modules))
    if model.lora_rank % max(1, model.tensor_model_parallel_size):  # less is refused elsewhere
        yield (
            f"--lora-rank {model.lora_rank} is not a multiple of --tensor-model-parallel-size "
            f"{model.tensor_model_parallel_size}, whose ranks share each adapter: choose another rank"
        )
    yield from _first_adapter_problems(model)


def peft_config(model: ModelArguments, modules: Sequence[str], *, images: bool = False) -> JsonObject:
    """Contents of ``PEFT_CONFIG`` for adapters of the ``modules``, by the last part of their names.

    ``images``: the model has a vision tower, whose layers of the same names have none.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.hf_checkpoint),
        **_settings(model),
        "target_modules": list(modules),
        "exclude_modules": r".*\bvisual\b.*" if images else None,
        "modules_to_save": None,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _settings(model: ModelArguments) -> JsonObject:
    """Fields of ``PEFT_CONFIG`` that decide what an adapter computes, but for its matrices."""
    return {
        "r": model.lora_rank,
        "lora_alpha": int(model.lora_alpha) if float(model.lora_alpha).is_integer() else model.lora_alpha,
        "use_dora": model.lora_type == "dora",
        "use_rslora": False,
        "fan_in_fan_out": False,
        "bias": "none",
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _first_adapter_problems(model: ModelArguments) -> Iterator[str]:
    """Reasons why training cannot start from the adapter in ``--lora-adapter-path``."""
    if model.lora_adapter_path is None:
        return
    path = model.lora_adapter_path / PEFT_CONFIG
    try:
        found = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        yield (
            f"--lora-adapter-path {model.lora_adapter_path}: cannot read {PEFT_CONFIG} ({error}): name a directory "
            "with an adapter in the peft library's format"
        )
        return
    if found.get("peft_type") != "LORA":
        yield f"{path}: expected peft_type LORA, found {found.get('peft_type')}: other adapters are not trained"
        return
    flags = {"r": "--lora-rank", "lora_alpha": "--lora-alpha", "use_dora": "--lora-type"}
    for name, expected in _settings(model).items():
        value = found.get(name, False)  # older versions of peft did not write all of them
        if (value or expected) and value != expected:
            what = f"change {flags[name]}" if name in flags else "merge the adapter into --hf-checkpoint"
            yield f"--lora-adapter-path: {path} has {name} {value}, expected {expected}: {what}"
