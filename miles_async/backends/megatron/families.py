"""Families of models that are trained, and those that are refused with the reason. Light to import.

A family is here when tests compare tiny models of it with transformers, in layouts of ranks: docs/families.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What config.json of a family may say beyond what all may, and how its layers are built."""

    attention_bias: bool = False
    partial_rotation: bool = False  # positions rotate a part of each head
    windows: bool = False  # layers whose attention sees the last tokens only
    yarn: bool = False
    rope_per_layer_type: bool = False  # another rotary base for layers with a window
    tied_only: bool = False  # the bridge takes it for granted that the output layer is the embedding
    gelu: bool = False  # the activation is gelu_pytorch_tanh, in place of silu
    unscaled_router: bool = False  # router weights of the chosen experts need not add up to 1
    host_layers: bool = False  # on every device: Transformer Engine's would compute something else


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(windows=True),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma": Family(tied_only=True, gelu=True),
    # Softcapping of attention, which no fused kernel of Transformer Engine has; rotations by kind of layer.
    "gemma2": Family(tied_only=True, gelu=True, windows=True, host_layers=True),
    "gemma3_text": Family(tied_only=True, gelu=True, windows=True, rope_per_layer_type=True, host_layers=True),
    "glm4": Family(attention_bias=True, partial_rotation=True),
    "qwen3_moe": Family(),
    "glm4_moe": Family(attention_bias=True, partial_rotation=True),
    "deepseek_v3": Family(yarn=True),
}
"""``model_type`` of config.json → family."""

REFUSED: Mapping[str, str] = {
    "gemma3": "its checkpoints hold an image encoder; use one of the text model, model_type 'gemma3_text'",
}
"""``model_type`` → why it is not trained, and what to do."""
