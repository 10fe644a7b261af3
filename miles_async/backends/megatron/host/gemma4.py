"""Layers of Gemma 4: a factor at the end of each, and heads of another size where attention has no window."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.bridge.models.gemma.modeling_gemma4 import (
    Gemma4MoELayer,
    Gemma4SelfAttention,
    Gemma4TopKRouter,
    Gemma4TransformerLayer,
    _is_local_attn_layer,
)
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class HeadsAttention(Gemma4SelfAttention):
    """Attention that picks its rotation from the two of ``JoinedRotaryEmbedding``."""

    def forward(self, hidden: Tensor, attention_mask: Tensor, *, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """Returns (output, bias)."""
        size = self.hidden_size_per_attention_head
        local = _is_local_attn_layer(self.layer_number, self.config.interleaved_attn_pattern)
        own = rotary_pos_emb[..., :size] if local else rotary_pos_emb[..., -size:]
        return super().forward(hidden, attention_mask, rotary_pos_emb=(own, own), **kwargs)


class ScaledLayer(TransformerLayer):
    """A dense layer, whose output is multiplied by a number of the checkpoint that is not trained."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super()._forward_mlp(*args, **kwargs)
        return out * self.layer_scalar


def make_gemma4(spec: ModuleSpec, *, mixture: bool) -> None:
    """Change the spec of a layer. Idempotent, as layers share one."""
    layer: Any = spec.submodules
    layer.self_attention.module = HeadsAttention
    if not mixture:
        spec.module = ScaledLayer
        return
    spec.module = Gemma4TransformerLayer
    layer.mlp.keywords["submodules"].router = Gemma4TopKRouter
    layer.mlp = partial(Gemma4MoELayer, **layer.mlp.keywords)
