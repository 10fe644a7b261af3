"""MiniMax-M2 for megatron-bridge, whose norm of all heads (0.6) sums squares over ranks without a gradient.

``apply`` replaces that norm, adds the names that layers without Transformer Engine and experts of SequentialMLP have,
and loads the norms' weights without CUDA.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import AutoMapping, MegatronParamMapping, ReplicatedMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.minimax_m2 import minimax_m2_bridge
from megatron.bridge.models.minimax_m2.minimax_m2_bridge import MiniMaxM2Bridge
from megatron.bridge.models.minimax_m2.minimax_m2_provider import minimax_m2_layer_spec

from miles_async.backends.megatron.norms import KeyHeadsNorm, QueryHeadsNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.transformer import ModuleSpec


def fused_layer_spec(config: GPTModelProvider) -> ModuleSpec:
    """Transformer Engine's layer with norms whose gradients cross tensor-parallel ranks."""
    spec: Any = minimax_m2_layer_spec(config)
    attention = spec.submodules.self_attention.submodules
    attention.q_layernorm, attention.k_layernorm = QueryHeadsNorm, KeyHeadsNorm
    return spec


@dataclass
class MiniMaxM2Provider(GPTModelProvider):
    """Megatron's config of MiniMax-M2."""

    transformer_layer_spec: ModuleSpec | Callable[[GPTModelProvider], ModuleSpec] = field(
        default_factory=lambda: fused_layer_spec
    )


def apply() -> None:
    """Change the bridge of MiniMax-M2. Not idempotent."""
    plain = MiniMaxM2Bridge.mapping_registry
    minimax_m2_bridge.minimax_m2_layer_spec = fused_layer_spec
    MiniMaxM2Bridge.PROVIDER_CLASS = MiniMaxM2Provider

    def mapping_registry(self: MiniMaxM2Bridge) -> MegatronMappingRegistry:
        return MegatronMappingRegistry(
            *map(_whole_norm, plain(self).mappings),
            AutoMapping("decoder.layers.*.input_layernorm.weight", "model.layers.*.input_layernorm.weight"),
        )

    MiniMaxM2Bridge.mapping_registry = mapping_registry


def _whole_norm(mapping: MegatronParamMapping) -> MegatronParamMapping:
    """Our norms of heads have whole weights on every rank."""
    if re.search(r"\.[qk]_layernorm\.", mapping.megatron_param):
        return ReplicatedMapping(mapping.megatron_param, mapping.hf_param)
    return mapping
