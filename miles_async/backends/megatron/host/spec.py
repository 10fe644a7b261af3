"""Layer spec without Transformer Engine.

The norm of megatron-core's local spec refuses sequence parallelism, its attention refuses packed sequences. This spec
replaces both with plain PyTorch, on any device (``norms.py``, ``host/attention.py``), where ``Platform`` says so.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.gemma.gemma2_provider import Gemma2ModelProvider
from megatron.bridge.models.gemma.gemma3_provider import Gemma3ModelProvider, Gemma3SelfAttention
from megatron.bridge.models.olmoe.olmoe_provider import OlMoEModelProvider, OLMoESelfAttention
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
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
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from miles_async.backends.megatron.families.gemma4_bridge import Gemma4Provider
from miles_async.backends.megatron.families.glm4_bridge import Glm4Provider
from miles_async.backends.megatron.families.minimax_m2 import MiniMaxM2Provider
from miles_async.backends.megatron.host.attention import SdpaAttention
from miles_async.backends.megatron.host.gemma4 import make_gemma4
from miles_async.backends.megatron.norms import GateNorm, HeadsNorm, KeyHeadsNorm, QueryHeadsNorm, RMSNorm

POST_NORMED = (Glm4Provider, Gemma2ModelProvider, Gemma3ModelProvider, Gemma4Provider)
"""Configs of families with a norm after attention and MLP."""


class NormedRowParallelLinear(RowParallelLinear):
    """RowParallelLinear with a norm of its output: GLM-4 and Gemma 2 to 4 have one after attention and MLP."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns (output, bias)."""
        output, bias = super().forward(x)
        return self.post_layernorm(output), bias


class ExpertRowParallelLinear(RowParallelLinear):
    """Down projection of an expert that has biases (gpt-oss).

    megatron-core (0.19) treats the bias as shared by tensor-parallel ranks, though these have different experts: its
    gradient would be summed over them and its norm counted once. And the MLP adds the bias in place, to an output that
    autograd does not allow to change.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel, self.bias.tensor_model_parallel = False, True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns (output, bias)."""
        output, bias = super().forward(x)
        return output.clone(), bias


for _type in (NormedRowParallelLinear, ExpertRowParallelLinear):
    AutoMapping.register_module_type(_type.__name__, "row")


class WholeLinear(torch.nn.Linear):
    """Linear layer replicated on all tensor-parallel ranks and applied to each rank's part of the sequence."""

    tensor_model_parallel = False  # for megatron-bridge

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig, **_: object) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Returns (output, no bias)."""
        return super().forward(x), None


class WholeDownProjections:
    """Latent attention with whole down projections, as Transformer Engine's spec has them.

    The local spec splits them by columns. Then the gradient of the shared rotary key, to which every rank's heads
    contribute, is not summed over ranks (megatron-core 0.19).
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        rank = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, rank, config)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)


class LatentAttention(WholeDownProjections, MLASelfAttention):
    """MLASelfAttention with whole down projections."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Keep the spec's layers: megatron-core (0.19) refuses them without q_lora_rank, but with normalised keys."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class LayerNorm(torch.nn.LayerNorm):
    """Norm of the keys of sparse attention's indexer."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class SparseLatentAttention(WholeDownProjections, AbsorbedMLASelfAttention):
    """AbsorbedMLASelfAttention with whole down projections."""


def host_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Build the layers of this pipeline stage, dense and mixture, and the final norm."""
    plain = copy.copy(config)
    plain.experimental_attention_variant = None  # which megatron-core (0.19) builds of Transformer Engine's layers only
    block = get_gpt_decoder_block_spec(
        plain, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    assert config.normalization == "RMSNorm", f"the host spec has no {config.normalization}"
    block.layer_norm = RMSNorm
    for spec in block.layer_specs:
        layer: Any = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        sparse = config.experimental_attention_variant == "dsa"
        if sparse:
            layer.self_attention = _sparse_attention_spec()
        parts = layer.self_attention.submodules
        if not sparse:
            parts.core_attention = SdpaAttention
        mlp = layer.mlp.keywords["submodules"]
        if isinstance(config, POST_NORMED):
            parts.linear_proj = NormedRowParallelLinear
            if not config.num_moe_experts:
                mlp.linear_fc2 = NormedRowParallelLinear
        if isinstance(config, Gemma4Provider):
            make_gemma4(spec, mixture=bool(config.num_moe_experts))
        if config.num_moe_experts and config.add_bias_linear:
            mlp.experts.keywords["submodules"].linear_fc2 = ExpertRowParallelLinear
        if isinstance(config, Gemma3ModelProvider):
            layer.self_attention.module = Gemma3SelfAttention  # which chooses the rotation by the kind of layer
        norm = RMSNorm
        if isinstance(config, OlMoEModelProvider):
            layer.self_attention.module, norm = OLMoESelfAttention, HeadsNorm
        if config.qk_layernorm:
            parts.q_layernorm = norm
        if sparse:
            continue
        if config.multi_latent_attention:
            layer.self_attention.module = LatentAttention
            parts.kv_layernorm = RMSNorm
        elif config.qk_layernorm:
            parts.k_layernorm = norm
        if isinstance(config, MiniMaxM2Provider):
            parts.q_layernorm, parts.k_layernorm = QueryHeadsNorm, KeyHeadsNorm
    if config.experimental_attention_variant == "gated_delta_net":
        linear = get_linear_attention_pattern(config)[get_transformer_layer_offset(config, vp_stage=vp_stage) :]
        block.layer_specs = [
            _with_gated_delta_net(spec) if is_linear else spec
            for spec, is_linear in zip(block.layer_specs, linear, strict=False)
        ]
    return block


def _with_gated_delta_net(layer: ModuleSpec) -> ModuleSpec:
    """The layer with a gated delta net in place of attention."""
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=GateNorm, out_proj=RowParallelLinear)
    net = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return replace(layer, submodules=replace(layer.submodules, self_attention=net))


def _sparse_attention_spec() -> ModuleSpec:
    """Spec of the attention of GLM-5 and DeepSeek-V3.2.

    Megatron-core's (0.19) attention and indexer are plain PyTorch where its fused kernels are absent; only their linear
    layers and norms are Transformer Engine's.
    """
    indexer = DSAIndexerSubmodules(
        linear_wq_b=WholeLinear, linear_wk=WholeLinear, k_norm=LayerNorm, linear_weights_proj=WholeLinear
    )
    return ModuleSpec(
        module=SparseLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=AbsorbedMLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,  # replaced, like keys' and values'
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
