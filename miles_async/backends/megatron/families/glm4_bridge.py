"""GLM-4 dense (Glm4ForCausalLM) for megatron-bridge, which (0.6) knows GLM's mixtures of experts only.

Its layers have a norm after attention and one after the MLP, as Gemma's have; positions rotate pairs of neighbours in
half of each head; and the files hold gate and up projection as one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    QKVMapping,
)
from megatron.bridge.models.gemma.gemma2_provider import TERowParallelLinearLayerNorm
from megatron.bridge.models.gpt_provider import GPTModelProvider, transformer_engine_layer_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import Glm4ForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.transformer import ModuleSpec
    from torch import Tensor
    from torch.nn import Module

WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "model.layers.*.input_layernorm.weight",
    "decoder.layers.*.self_attention.linear_proj.weight": "model.layers.*.self_attn.o_proj.weight",
    "decoder.layers.*.self_attention.linear_proj.post_layernorm.weight": (
        "model.layers.*.post_self_attn_layernorm.weight"
    ),
    "decoder.layers.*.mlp.linear_fc1.layer_norm_weight": "model.layers.*.post_attention_layernorm.weight",
    "decoder.layers.*.mlp.linear_fc2.weight": "model.layers.*.mlp.down_proj.weight",
    "decoder.layers.*.mlp.linear_fc2.post_layernorm.weight": "model.layers.*.post_mlp_layernorm.weight",
}
"""Megatron's name → name in the files, for parameters that are the same in both."""


def fused_layer_spec(config: GPTModelProvider) -> ModuleSpec:
    """Transformer Engine's layer with a norm after attention and MLP."""
    spec: Any = transformer_engine_layer_spec(config)
    spec.submodules.self_attention.submodules.linear_proj = TERowParallelLinearLayerNorm
    spec.submodules.mlp.keywords["submodules"].linear_fc2 = TERowParallelLinearLayerNorm
    return spec


@dataclass
class Glm4Provider(GPTModelProvider):
    """Megatron's config of GLM-4 dense."""

    transformer_layer_spec: ModuleSpec | Callable[[GPTModelProvider], ModuleSpec] = field(
        default_factory=lambda: fused_layer_spec
    )
    normalization: str = "RMSNorm"
    gated_linear_unit: bool = True
    add_bias_linear: bool = False
    hidden_dropout: float = 0.0
    position_embedding_type: str = "rope"
    rotary_interleaved: bool = True


class FusedGateMapping(MegatronParamMapping):
    """Gate and up projection of a gated MLP that the files hold as one matrix, the gate first: [2F, H]."""

    def __init__(self, megatron_param: str, hf_param: str) -> None:
        super().__init__(megatron_param, hf_param)
        self._halves = GatedMLPMapping(megatron_param, gate=f"{hf_param}:gate", up=f"{hf_param}:up")

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: Module) -> Tensor:
        """This rank's rows of both projections, [2F / TP, H]."""
        gate, up = hf_weights.chunk(2)
        return self._halves.hf_to_megatron({"gate": gate, "up": up}, megatron_module)

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: Module | None) -> dict[str, Tensor]:
        """The whole matrix by its name in the files."""
        halves = self._halves.megatron_to_hf(megatron_weights, megatron_module)
        return {str(self.hf_param): torch.cat(list(halves.values()))} if halves else {}


@MegatronModelBridge.register_bridge(source=Glm4ForCausalLM, target=GPTModel, provider=Glm4Provider, model_type="glm4")
class Glm4Bridge(MegatronModelBridge):
    """Config and names of GLM-4 dense."""

    def mapping_registry(self) -> MegatronMappingRegistry:
        layer, attention = "decoder.layers.*", "model.layers.*.self_attn"
        return MegatronMappingRegistry(
            *(AutoMapping(ours, theirs) for ours, theirs in WHOLE.items()),
            *(
                QKVMapping(
                    f"{layer}.self_attention.linear_qkv.{kind}",
                    q=f"{attention}.q_proj.{kind}",
                    k=f"{attention}.k_proj.{kind}",
                    v=f"{attention}.v_proj.{kind}",
                )
                for kind in ("weight", "bias")
            ),
            FusedGateMapping(f"{layer}.mlp.linear_fc1.weight", "model.layers.*.mlp.gate_up_proj.weight"),
        )
