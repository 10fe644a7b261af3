"""Bugs of megatron-bridge 0.3 that corrupt weights silently. Independent of the device: applied on every platform.

- A strided split is scattered to tensor-parallel ranks: gloo ignores strides, so row-parallel weights
  come out permuted at TP > 1.
- The number of an expert is looked for at the end of TEGroupedMLP's parameter names (``linear_fc1.weight3``) only.
  SequentialMLP's (``local_experts.3.linear_fc1.weight``) are numbered and sorted wrongly over expert-parallel
  ranks, and some families have no mapping for them at all. The bridge gets to see TEGroupedMLP's names instead.
- PEFT takes names that megatron-core leaves as None for Transformer Engine's classes, where that is not installed.
- Of a tied model's virtual pipeline stages, the output layer is looked for in a rank's first one. It is in the last.
- Mistral's and Gemma 3's configs are read by names that transformers 5 doesn't have (``rope_theta``). The bridge's
  general reading takes what is there; ``provider_fields`` has the rest.
- Gemma 3's embedding is not scaled by the root of the hidden size as bfloat16 has it, which transformers does.
- Gemma 3's rotary embeddings are a tuple, which full recomputation cannot keep: it saves tensors.
- OLMoE's norm of all heads expects them all on every tensor-parallel rank.
- Layers for multi-token prediction are unknown in DeepSeek-V3, and in GLM-4 for some of the bridge's calls. They get
  names of further layers of the model, as in the files, and of their four additional parts.
- Kimi K2's model_type is unknown to transformers, without code from the checkpoint. Its architecture is DeepSeek-V3's.

``tests/integration/test_megatron_compat.py`` fails when upstream no longer needs one of them.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import Any

AFFECTED = "0.3."

logger = logging.getLogger(__name__)
_applied = False


def apply() -> bool:
    """Fix the installed megatron-bridge if it is an affected version. True if it is. Idempotent."""
    global _applied
    version = importlib.metadata.version("megatron-bridge")
    if not version.startswith(AFFECTED):
        logger.warning("megatron-bridge %s: fixes for %sx are not applied; run the bridge tests", version, AFFECTED)
        return False
    if not _applied:
        _applied = True
        _scatter_contiguous_splits()
        _name_experts_as_grouped()
        _tie_last_virtual_stage()
        _read_configs_without_rope_theta()
        _round_the_scale_of_embeddings()
        _stack_rotary_embeddings()
        _see_that_transformer_engine_is_absent()
        _normalize_heads_over_ranks()
        _know_kimi_k2()
        _name_layers_for_multi_token_prediction()
    return True


def _scatter_contiguous_splits() -> None:
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    scatter = MegatronParamMapping.scatter_to_tp_ranks

    def scatter_to_tp_ranks(self: Any, splits: Any, *args: Any, **kwargs: Any) -> Any:
        return scatter(self, [split.contiguous() for split in splits] if splits else splits, *args, **kwargs)

    MegatronParamMapping.scatter_to_tp_ranks = scatter_to_tp_ranks


def _name_experts_as_grouped() -> None:
    from megatron.bridge.models.conversion import model_bridge, param_mapping

    unwrap = model_bridge.MegatronModelBridge._unwrap_name
    find = model_bridge.get_module_and_param_from_name

    def _unwrap_name(self: Any, name: str) -> str:
        return re.sub(
            r"\.local_experts\.(\d+)\.(linear_fc\d(?:\.to_wrap)?\.(?:weight|bias))$", r".\2\1", unwrap(self, name)
        )

    def get_module_and_param_from_name(models: Any, param_name: str, vp_stage: int | None = None) -> Any:
        sequential = re.sub(
            r"\.experts\.(linear_fc\d(?:\.to_wrap)?\.(?:weight|bias))(\d+)$",
            r".experts.local_experts.\2.\1",
            param_name,
        )
        try:
            return find(models, sequential, vp_stage)
        except ValueError:  # TEGroupedMLP, if any
            return find(models, param_name, vp_stage)

    model_bridge.MegatronModelBridge._unwrap_name = _unwrap_name
    for module in (model_bridge, param_mapping):
        module.get_module_and_param_from_name = get_module_and_param_from_name


def _tie_last_virtual_stage() -> None:
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.core import parallel_state

    broadcast = MegatronModelBridge._broadcast_shared_embeddings

    def _broadcast_shared_embeddings(self: Any, models: Any) -> None:
        last = parallel_state.is_pipeline_last_stage() and isinstance(models, list)
        broadcast(self, models[-1:] if last else models)

    MegatronModelBridge._broadcast_shared_embeddings = _broadcast_shared_embeddings


def _read_configs_without_rope_theta() -> None:
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.bridge.models.gemma.gemma3_bridge import Gemma3ModelBridge
    from megatron.bridge.models.mistral.mistral_bridge import MistralBridge
    from megatron.bridge.models.mistral.mistral_provider import MistralModelProvider

    MistralBridge.PROVIDER_CLASS = MistralModelProvider
    for bridge in (MistralBridge, Gemma3ModelBridge):
        bridge.provider_bridge = MegatronModelBridge.provider_bridge


def _round_the_scale_of_embeddings() -> None:
    import torch
    from megatron.bridge.models.gemma.gemma3_provider import Gemma3LanguageModelEmbedding
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        embeddings = LanguageModelEmbedding.forward(self, *args, **kwargs)
        return embeddings * torch.tensor(self.config.hidden_size**0.5, dtype=embeddings.dtype)

    Gemma3LanguageModelEmbedding.forward = forward


def _stack_rotary_embeddings() -> None:
    import torch
    from megatron.bridge.models.gemma.gemma3_provider import Gemma3RotaryEmbedding, Gemma3SelfAttention

    rotary, attention = Gemma3RotaryEmbedding.forward, Gemma3SelfAttention.forward

    def stacked(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.stack(rotary(self, *args, **kwargs))

    def unstacked(self: Any, *args: Any, rotary_pos_emb: torch.Tensor, **kwargs: Any) -> Any:
        return attention(self, *args, rotary_pos_emb=tuple(rotary_pos_emb), **kwargs)

    Gemma3RotaryEmbedding.forward = stacked
    Gemma3SelfAttention.forward = unstacked


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


def _know_kimi_k2() -> None:
    from transformers import AutoConfig, DeepseekV3Config

    class KimiK2Config(DeepseekV3Config):
        model_type = "kimi_k2"

    AutoConfig.register(KimiK2Config.model_type, KimiK2Config, exist_ok=True)


def _name_layers_for_multi_token_prediction() -> None:
    from megatron.bridge.models.conversion import model_bridge
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
    from megatron.bridge.models.glm.glm45_bridge import GLM45Bridge

    number = model_bridge._megatron_local_name_to_global
    parts = {name: name for name in ("enorm", "hnorm", "eh_proj")} | {"final_layernorm": "shared_head.norm"}
    own = [AutoMapping(f"decoder.layers.*.{a}.weight", f"model.layers.*.{b}.weight") for a, b in parts.items()]

    def _megatron_local_name_to_global(models: Any, config: Any, param_name: str, vp_stage: int | None = None) -> str:
        name = number(models, config, param_name, vp_stage)
        if found := re.match(r"mtp\.layers\.(\d+)\.(?:transformer_layer\.)?", name):
            return f"decoder.layers.{config.num_layers + int(found[1])}.{name[found.end() :]}"
        return name

    model_bridge._megatron_local_name_to_global = _megatron_local_name_to_global
    for bridge in (DeepSeekV3Bridge, GLM45Bridge):

        def mapping_registry(self: Any, plain: Any = bridge.mapping_registry) -> Any:
            return MegatronMappingRegistry(*plain(self).mappings, *own)

        bridge.mapping_registry = mapping_registry
