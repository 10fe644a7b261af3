"""Layers of hybrid models (Nemotron-H) without Transformer Engine: each is Mamba-2, attention, an MLP or a mixture."""

from __future__ import annotations

from typing import Any

from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.post_training.modelopt.hybrid.model_specs import get_hybrid_stack_modelopt_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer

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
    """Build the spec of a model's layers: megatron-core's local ones, with other norms and attention."""
    assert config.normalization == "RMSNorm", f"the host spec has no {config.normalization}"
    spec = get_hybrid_stack_modelopt_spec(local_core_attention=True)
    spec.module = HostStack
    layers: Any = spec.submodules
    layers.mlp_layer.module, layers.moe_layer.module = MLPLayer, MoETransformerLayer
    layers.mamba_layer.submodules.norm = RMSNorm
    for layer in (layers.mlp_layer, layers.moe_layer):
        layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layers.attention_layer.submodules
    attention.input_layernorm = RMSNorm
    attention.self_attention.submodules.core_attention = SdpaAttention
    return spec
