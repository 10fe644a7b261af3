"""Fixes of bugs in megatron-bridge 0.6 that corrupt weights silently, applied on every platform.

- Some mixtures have no names for experts of SequentialMLP (``local_experts.3.linear_fc1.weight``): GLM-4.5, MiniMax-M2,
  OLMoE, Gemma 4.
- Gemma 3's embedding is not scaled by the root of the hidden size as bfloat16 has it, which transformers does.
- PEFT takes names that megatron-core leaves as None for Transformer Engine's classes, where that is not installed.
- OLMoE's norm of all heads expects them all on every tensor-parallel rank; MiniMax-M2's has no gradient across ranks.
- Norms of gated delta nets (Qwen3-Next, Qwen3.5) are stored less 1, which rounds weights below 1/2 and above 2.
- Kimi K2's model_type is unknown to transformers, without code from the checkpoint. Its architecture is DeepSeek-V3's.

``tests/integration/test_megatron_compat.py`` fails when upstream no longer needs one of them.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any


@cache
def apply() -> None:
    """Fix megatron-bridge. Idempotent."""
    from miles_async.backends.megatron.families import minimax_m2

    minimax_m2.apply()
    _name_single_experts()
    _round_the_scale_of_embeddings()
    _see_that_transformer_engine_is_absent()
    _normalize_heads_over_ranks()
    _store_gate_norms_exactly()
    _know_kimi_k2()


def _name_single_experts() -> None:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

    grouped = re.compile(r"(?<=\.experts\.)(linear_fc\d\.weight)\*$")
    add_names = MegatronMappingRegistry._add_separate_layernorm_mappings

    def add_more_names(self: Any) -> None:
        add_names(self)
        known = {mapping.megatron_param for mapping in self.mappings}
        for mapping in list(self.mappings):
            single = copy.copy(mapping)
            single.megatron_param = grouped.sub(r"local_experts.*.\1", mapping.megatron_param)
            if single.megatron_param not in known:
                self.mappings.append(single)

    MegatronMappingRegistry._add_separate_layernorm_mappings = add_more_names


def _round_the_scale_of_embeddings() -> None:
    import torch
    from megatron.bridge.models.gemma.gemma3_provider import Gemma3LanguageModelEmbedding
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        embeddings = LanguageModelEmbedding.forward(self, *args, **kwargs)
        return embeddings * torch.tensor(self.config.hidden_size**0.5, dtype=embeddings.dtype)

    Gemma3LanguageModelEmbedding.forward = forward


def _see_that_transformer_engine_is_absent() -> None:
    from megatron.bridge.peft import utils

    utils.HAVE_TE = all(isinstance(layer, type) for layer in (*utils.TECL, *utils.TERL, utils.TELinear))


def _normalize_heads_over_ranks() -> None:
    from megatron.bridge.models.olmoe import olmoe_bridge
    from megatron.bridge.models.olmoe.olmoe_provider import OlMoEModelProvider

    from miles_async.backends.megatron.norms import HeadsNorm

    fused = olmoe_bridge.olmoe_layer_spec

    def olmoe_layer_spec(config: Any) -> Any:
        spec = fused(config)
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = HeadsNorm
        return spec

    olmoe_bridge.olmoe_layer_spec = olmoe_layer_spec
    olmoe_bridge.OlMoEBridge.PROVIDER_CLASS = OlMoEModelProvider  # by which host/spec.py knows the family


def _store_gate_norms_exactly() -> None:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.qwen import qwen3_next_bridge, qwen35_bridge
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    from miles_async.backends.megatron.norms import GateNorm

    whole: Any = AutoMapping
    qwen3_next_bridge.RMSNorm2ZeroCenteredRMSNormMapping = whole
    qwen35_bridge.RMSNorm2ZeroCenteredRMSNormMapping = whole
    fused = specs.get_gated_delta_net_module_spec

    def get_gated_delta_net_module_spec(*args: Any, **kwargs: Any) -> Any:
        spec = fused(*args, **kwargs)
        spec.submodules.out_norm = GateNorm
        return spec

    specs.get_gated_delta_net_module_spec = get_gated_delta_net_module_spec


def _know_kimi_k2() -> None:
    from transformers import AutoConfig, DeepseekV3Config

    class KimiK2Config(DeepseekV3Config):
        model_type = "kimi_k2"

    AutoConfig.register(KimiK2Config.model_type, KimiK2Config, exist_ok=True)
