"""DeepSeek-V3.2 for megatron-bridge, which (0.6) knows its sparse attention in GLM-5 only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
from megatron.bridge.models.glm_moe_dsa.glm5_bridge import GLM5Bridge
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import DeepseekV32ForCausalLM

if TYPE_CHECKING:
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM


@MegatronModelBridge.register_bridge(
    source=DeepseekV32ForCausalLM, target=GPTModel, provider=MLAModelProvider, model_type="deepseek_v32"
)
class DeepSeekV32Bridge(DeepSeekV3Bridge):
    """DeepSeek-V3's config, with GLM-5's indexer and names."""

    def provider_bridge(self, hf_pretrained: PreTrainedCausalLM) -> MLAModelProvider:
        provider, config = super().provider_bridge(hf_pretrained), hf_pretrained.config
        provider.transformer_layer_spec = get_transformer_block_with_experimental_attention_variant_spec
        provider.experimental_attention_variant = "dsa"
        provider.cp_comm_type = "allgather"
        provider.dsa_indexer_head_dim = config.index_head_dim
        provider.dsa_indexer_n_heads = config.index_n_heads
        provider.dsa_indexer_topk = config.index_topk
        provider.dsa_indexer_rope_interleaved = False
        # Multiplies queries and keys with the same orthogonal matrix, so that fewer bits suffice: engines' have 8.
        provider.dsa_indexer_rotate_activation = False
        provider.dsa_indexer_k_norm_epsilon = 1e-6
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        return GLM5Bridge.mapping_registry(self)
