"""Layers of hybrid models (Nemotron-H) without Transformer Engine: each is Mamba-2, attention, an MLP or a mixture."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from miles_async.backends.megatron.host.attention import SdpaAttention
from miles_async.backends.megatron.norms import RMSNorm


class HostStack(HybridStack):
    """HybridStack whose final norm is not Transformer Engine's."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs, post_layer_norm=False)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)


def host_stack_spec(config: HybridModelProvider) -> ModuleSpec:
    """Build the spec of a model's layers."""
    assert config.normalization == "RMSNorm", f"the host spec has no {config.normalization}"
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=SdpaAttention, linear_proj=RowParallelLinear
    )
    layers = HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=RMSNorm,
                mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=RMSNorm,
                self_attention=ModuleSpec(
                    module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=RMSNorm,
                mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=RMSNorm,
                mlp=get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
                if config.num_moe_experts
                else None,
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    )
    return ModuleSpec(module=HostStack, submodules=layers)
