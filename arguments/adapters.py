"""Adapters (LoRA, DoRA): which layers get one, and what their flags mean together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from miles_async.errors import ConfigurationError

if TYPE_CHECKING:
    from miles_async.arguments import Arguments

LoraType = Literal["lora", "dora"]

ALL_LINEAR = "all-linear"

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
            f"found {', '.join(unknown)}"
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
    """The flags of adapters fit each other and the layout of ranks."""
    model, defaults = arguments.model, type(arguments.model)()
    if not model.lora_rank:
        names = ("lora_type", "lora_alpha", "target_modules")
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(model, name) != getattr(defaults, name)]
        if given:
            yield f"without --lora-rank there are no adapters, so that {' and '.join(given)} have no effect: give it"
        return
    try:
        target_layers(model.target_modules)
    except ConfigurationError as error:
        yield str(error)
    if model.lora_rank % model.tensor_model_parallel_size:
        yield (
            f"--lora-rank {model.lora_rank} is not a multiple of --tensor-model-parallel-size "
            f"{model.tensor_model_parallel_size}, whose ranks share each adapter: choose another rank"
        )
