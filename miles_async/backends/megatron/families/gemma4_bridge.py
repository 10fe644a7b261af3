"""Gemma 4's text model for megatron-bridge, whose own (0.6) has no pipeline stages for dense models, no layers without
Transformer Engine for mixtures, and fails with the configs of transformers 5.19.

Dense models and mixtures are built alike here: of the host's layers (``host/gemma4.py``), with megatron-bridge's
attention, router and mixture of experts. Layers without a window have heads of another size and number, and may take
their keys as values.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping
from megatron.bridge.models.gemma.gemma4_bridge import Gemma4Bridge
from megatron.bridge.models.gemma.gemma4_provider import Gemma4ModelProvider
from megatron.bridge.models.gemma.modeling_gemma4 import Gemma4RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import Gemma4ForCausalLM

from miles_async.arguments.model import full_attention

if TYPE_CHECKING:
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from torch import Tensor

DENSE = {
    "decoder.layers.*.mlp.linear_fc1.layer_norm_weight": "model.layers.*.pre_feedforward_layernorm.weight",
    "decoder.layers.*.mlp.linear_fc2.weight": "model.layers.*.mlp.down_proj.weight",
    "decoder.layers.*.mlp.linear_fc2.post_layernorm.weight": "model.layers.*.post_feedforward_layernorm.weight",
}
"""Names of a dense model's MLP and norms. Mixtures have them next to their experts."""

OF_MIXTURES = (".mlp.", ".pre_mlp_", ".pre_shared_", ".post_ffn_")
"""In megatron-bridge's names of the parts that only mixtures have, or have elsewhere."""


class JoinedRotaryEmbedding(Gemma4RotaryEmbedding):
    """Angles of layers with a window and of the others, concatenated: recomputed layers receive only tensors."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """[positions, 1, 1, head size with a window + head size without]."""
        return torch.cat(super().forward(*args, **kwargs), -1)


@dataclass
class Gemma4Provider(Gemma4ModelProvider):
    """Megatron's config of Gemma 4, dense or not."""

    def provide(self, *args: Any, **kwargs: Any) -> GPTModel:
        model = super().provide(*args, **kwargs)
        model.rotary_pos_emb.__class__ = JoinedRotaryEmbedding
        return model


@MegatronModelBridge.register_bridge(
    source=Gemma4ForCausalLM, target=GPTModel, provider=Gemma4Provider, model_type="gemma4"
)
class Gemma4TextBridge(Gemma4Bridge):
    """Config and names of Gemma 4's text model."""

    def provider_bridge(self, hf_pretrained: PreTrainedCausalLM) -> Gemma4Provider:
        config = copy.copy(hf_pretrained.config)
        config.allow_global_per_layer_attribute_access = True  # the heads of layers with a window
        provider: Any = self._build_moe_provider(config)
        provider.__class__ = Gemma4Provider  # whose fields are the same
        if (heads := full_attention(config.to_dict())) is not None:
            _, provider.global_head_dim, provider.num_global_key_value_heads = heads
        if not config.enable_moe_block:
            provider.num_moe_experts = provider.moe_ffn_hidden_size = None
            provider.moe_shared_expert_intermediate_size = None
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        mixture = self._moe_mapping_registry()
        if self._text_config().enable_moe_block:
            return mixture
        gate = GatedMLPMapping(
            "decoder.layers.*.mlp.linear_fc1.weight",
            gate="model.layers.*.mlp.gate_proj.weight",
            up="model.layers.*.mlp.up_proj.weight",
        )
        kept = (each for each in mixture.mappings if not any(part in each.megatron_param for part in OF_MIXTURES))
        return MegatronMappingRegistry(*kept, gate, *(AutoMapping(*pair) for pair in DENSE.items()))
