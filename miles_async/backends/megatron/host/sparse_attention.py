"""Layers of DeepSeek's sparse attention (GLM-5, DeepSeek-V3.2) without Transformer Engine.

Megatron-core's (0.19) attention and indexer are plain PyTorch where its fused kernels are absent; only their linear
layers and norms are Transformer Engine's.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
    AbsorbedMLASelfAttentionSubmodules,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from miles_async.backends.megatron.host.linear import WholeLinear
from miles_async.backends.megatron.norms import RMSNorm


class LayerNorm(torch.nn.LayerNorm):
    """Norm of the indexer's keys."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class SparseLatentAttention(AbsorbedMLASelfAttention):
    """AbsorbedMLASelfAttention with whole down projections, as Transformer Engine's spec has them."""

    def __init__(self, config: MLATransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        rank = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, rank, config)
        self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)


def sparse_attention_spec() -> ModuleSpec:
    """Spec of a layer's attention."""
    indexer = DSAIndexerSubmodules(
        linear_wq_b=WholeLinear, linear_wk=WholeLinear, k_norm=LayerNorm, linear_weights_proj=WholeLinear
    )
    return ModuleSpec(
        module=SparseLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=AbsorbedMLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,  # replaced, as that of keys and values
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=ModuleSpec(
                module=DSAttention,
                submodules=DSAttentionSubmodules(indexer=ModuleSpec(module=DSAIndexer, submodules=indexer)),
            ),
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )
