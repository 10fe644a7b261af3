"""Megatron's fused kernels: on where they compute the same, off where they are missing.

Megatron's own command line, and so slime's recipes, has these on by default; the configs that megatron-bridge (0.6)
makes have most of them off. A ``--megatron-X`` of the user comes after these and wins.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

APEX = "fused_weight_gradient_mlp_cuda"
"""Apex's extension, without which megatron-core's output layer refuses ``gradient_accumulation_fusion``."""


def default_fusions(provider: Any) -> Mapping[str, bool]:
    """Choose fusions for a rank with Transformer Engine on CUDA. ``provider``: megatron's config of the model.

    - Rotary embeddings: the plain form reads the lengths of packed samples on the host twice per layer and direction
      (megatron.core.models.common.embeddings.rope_utils). Transformer Engine's kernel has no
      scaling of YaRN (``mscale`` is dropped) and none for latent attention but YaRN's.
    - SwiGLU: bias, gate and product in one kernel, which knows neither clamping nor an offset.
    - Bias-dropout-add: enabled for all models.
    - Accumulation of gradients: the bridge (0.6) turns it on where Transformer Engine is there, whose layers need no
      Apex for it; but the output layer is megatron-core's own (0.19, ``ColumnParallelLinear``), which does.
    """
    plain_rope = provider.position_embedding_type == "rope" and not provider.multi_latent_attention
    plain_swiglu = (
        provider.activation_func is F.silu
        and provider.gated_linear_unit
        and provider.activation_func_clamp_value is None
        and provider.glu_linear_offset == 0.0
        and not provider.use_te_activation_func
    )
    chosen = {"bias_dropout_fusion": True}
    if plain_rope:
        chosen["apply_rope_fusion"] = True
    if plain_swiglu:
        chosen["bias_activation_fusion"] = True
    if importlib.util.find_spec(APEX) is None:
        chosen["gradient_accumulation_fusion"] = False
    return chosen
