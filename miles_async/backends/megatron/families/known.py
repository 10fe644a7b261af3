"""Families of models that are trained, and families that are refused with a reason. Light to import.

Tests compare tiny models of every family here with transformers, in several layouts of ranks: docs/families.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Values of config.json accepted in this family but not in all, and how its layers are built."""

    attention_bias: bool = False
    partial_rotation: bool = False  # positions rotate a part of each head
    windows: bool = False  # layers whose attention sees the last tokens only
    yarn: bool = False
    rope_per_layer_type: bool = False  # another rotary base for layers with a window
    tied_only: bool = False  # the bridge assumes that the output layer is the embedding
    untied_only: bool = False  # SGLang 0.5.23 has a separate output layer, which no tensor of a tied model fills
    gelu: bool = False  # the activation is gelu_pytorch_tanh, in place of silu
    unscaled_router: bool = False  # router weights of the chosen experts need not add up to 1
    every_head_with_keys: bool = False  # queries must not share heads of keys and values
    whole_experts: bool = False  # no tensor parallelism inside of an expert
    adapters: bool = True  # trained with --lora-rank
    ahead: bool = False  # its layers for multi-token prediction are trained with --enable-mtp-training
    gpu_engines: str = ""  # why engines cannot serve it on a CPU
    images: bool = False  # it reads images, by a vision tower that is trained, too
    interleaved_mrope: bool = False  # neighbouring parts of a head turn by different numbers of a position
    linear_attention: bool = False  # some layers are gated delta nets: a recurrence in place of attention
    state_space: bool = False  # layers are Mamba-2, attention, MLP or mixture
    float8: bool = False  # served with --rollout-quantization fp8
    host_layers: bool = False  # on every device: Transformer Engine's compute something else, or fail


_INDEXER = "SGLang 0.5.23 chooses the tokens of sparse attention with kernels for GPUs only"

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),  # SGLang (0.5.23) serves it without windows
    "qwen2": Family(float8=True),
    "qwen3": Family(float8=True),
    "gemma": Family(tied_only=True, gelu=True),
    # Softcapping of attention, which no fused kernel of Transformer Engine has; rotations by kind of layer.
    "gemma2": Family(tied_only=True, gelu=True, windows=True, host_layers=True),
    "gemma3_text": Family(tied_only=True, gelu=True, windows=True, rope_per_layer_type=True, host_layers=True),
    # Heads of up to 512, different ones where attention has no window, and a factor per layer.
    "gemma4_text": Family(
        tied_only=True, gelu=True, windows=True, rope_per_layer_type=True, adapters=False, host_layers=True
    ),
    "glm4": Family(attention_bias=True, partial_rotation=True),
    "qwen3_moe": Family(untied_only=True, float8=True),
    # Their files may hold layers for multi-token prediction ("mtp."), which are left as they are.
    "qwen3_next": Family(partial_rotation=True, untied_only=True, linear_attention=True, adapters=False),
    "qwen3_5_text": Family(partial_rotation=True, linear_attention=True, adapters=False),
    "qwen3_5_moe_text": Family(partial_rotation=True, untied_only=True, linear_attention=True, adapters=False),
    "glm4_moe": Family(attention_bias=True, partial_rotation=True, untied_only=True, ahead=True, float8=True),
    "glm4_moe_lite": Family(untied_only=True, ahead=True, float8=True),  # GLM-4.7-Flash: latent attention, GLM's router
    "minimax_m2": Family(partial_rotation=True, untied_only=True, float8=True),
    "nemotron_h": Family(adapters=False, state_space=True),
    "olmoe": Family(unscaled_router=True, every_head_with_keys=True, untied_only=True),
    # No kernel of Transformer Engine (2.10, 2.11) takes softmax sinks with packed sequences
    # (pytorch/attention/dot_product_attention/utils.py: softmax_type with qkv_format thd).
    "gpt_oss": Family(
        attention_bias=True,
        windows=True,
        yarn=True,
        whole_experts=True,
        adapters=False,
        host_layers=True,
        untied_only=True,
    ),
    "deepseek_v3": Family(yarn=True, ahead=True, float8=True),
    "deepseek_v32": Family(yarn=True, adapters=False, gpu_engines=_INDEXER),
    "glm_moe_dsa": Family(adapters=False, gpu_engines=_INDEXER),  # GLM-5
    "kimi_k2": Family(yarn=True, ahead=True, float8=True),  # DeepSeek-V3's architecture
    "qwen2_5_vl": Family(images=True),
    "qwen3_vl": Family(images=True, interleaved_mrope=True),
    "qwen3_vl_moe": Family(images=True, adapters=False, interleaved_mrope=True),
}
"""``model_type`` of config.json → family."""

REFUSED: Mapping[str, str] = {
    "nemotron": "SGLang 0.5.23 cannot serve it; use a Nemotron whose model_type is 'llama'",
    "nemotron-nas": "its layers differ in size, which was not compared; use a Nemotron whose model_type is 'llama'",
    "gemma4": "its checkpoints hold encoders of images and sound; write the text model alone first, of model_type "
    "'gemma4_text': docs/families.md has the lines",
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"),
        "its checkpoints hold an image encoder; write the text model alone first, whose model_type ends with '_text': "
        "docs/families.md has the lines",
    ),
    "kimi_k25": "its checkpoints hold an image encoder, and experts in four bits; write the text model alone in bf16 "
    "first, of model_type 'kimi_k2': docs/families.md",
    "gemma3": "its checkpoints hold an image encoder; use one of the text model, model_type 'gemma3_text'",
}
"""``model_type`` → why it is not trained, and what to do."""
