"""Qwen3-VL for megatron-bridge, whose own model of it (0.6) needs Transformer Engine in both towers.

Built as the bridge builds Qwen2.5-VL: transformers' vision tower, and megatron-core's language model. What is new is
deepstack: features of several layers of the tower are added to the hidden states after the first layers of the language
model, where images are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping
from megatron.bridge.models.qwen.qwen35_bridge import _moe_routed_expert_mappings
from megatron.bridge.models.qwen_vl.qwen3_vl_bridge import Qwen3VLBridge, Qwen3VLMoEBridge
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider
from megatron.bridge.training.utils.packed_seq_utils import (
    repack_mcore_thd_position_ids,
    unpack_mcore_thd_tensor_for_position_ids,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLVisionModel

if TYPE_CHECKING:
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM


@dataclass(kw_only=True)
class DeepFeatures(PackedSeqParams):
    """Sequences, and what is added to their hidden states after the first layers.

    Layers get it as an argument, also when they are computed again in the backward pass.
    """

    places: Tensor  # int64 [K]: positions of image tokens, in [0, T)
    features: Sequence[Tensor]  # of each layer, [K, H], without gradients
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of these, by layer


class _AddFeatures(torch.autograd.Function):
    """Hidden states [T, 1, H] with the features of a layer. Keeps the gradients of these.

    Autograd would follow them into the vision tower from within the backward pass of a recomputed layer.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, deep: DeepFeatures, layer: int) -> Tensor:
        ctx.deep, ctx.layer = deep, layer
        return hidden.index_add(0, deep.places, deep.features[layer][:, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.deep.gradients[ctx.layer] = gradient[ctx.deep.places, 0]
        return gradient, None, None


class _PassGradients(torch.autograd.Function):
    """The input of the first layer as it is. Gives ``features`` the gradients that the layers have kept by then."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, deep: DeepFeatures, *features: Tensor) -> Tensor:
        ctx.deep, ctx.count = deep, len(features)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, *(ctx.deep.gradients.pop(layer, None) for layer in range(ctx.count))


def _add_features(number: int) -> Any:
    """A hook of layer ``number``."""

    def hook(_: object, __: object, given: dict[str, Any], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        deep, (hidden, context) = given["packed_seq_params"], output
        return (_AddFeatures.apply(hidden, deep, number) if isinstance(deep, DeepFeatures) else hidden), context

    return hook


class DeepstackModel(MegatronModule):
    """Vision tower and language model, on one pipeline stage."""

    def __init__(self, config: Qwen3VLProvider) -> None:
        super().__init__(config=config)
        self.pre_process = self.post_process = True
        self.vp_stage = None
        self.visual = Qwen3VLVisionModel._from_config(config.vision_config)
        self.language_model = config.provide_language_model(pre_process=True, post_process=True)
        self.share_embeddings_and_output_weights = config.share_embeddings_and_output_weights
        self.shared_embedding_or_output_weight = self.language_model.shared_embedding_or_output_weight
        for name in ("get_rope_index", "get_vision_position_ids"):
            setattr(self, name, MethodType(getattr(Qwen3VLModel, name), self))
        first = self.language_model.decoder.layers[: len(config.vision_config.deepstack_visual_indexes)]
        for number, layer in enumerate(first):
            layer.register_forward_hook(_add_features(number), with_kwargs=True)

    def set_input_tensor(self, input_tensor: object) -> None:
        """As megatron's schedule expects; there is no earlier stage."""
        self.language_model.set_input_tensor(input_tensor)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
    ) -> Tensor:
        """``input_ids``: [1, T]. Their positions follow from the images: ``position_ids`` are not read."""
        hidden = self.language_model.embedding(input_ids=input_ids, position_ids=None)  # [T, 1, H]
        token = self.config.image_token_id
        if pixel_values is not None:
            found = self.visual(pixel_values.to(self.visual.dtype), grid_thw=image_grid_thw, return_dict=True)
            first, *deep = (each.to(hidden.dtype) for each in (found.pooler_output, *found.deepstack_features))
            [places] = (input_ids[0] == token).nonzero(as_tuple=True)
            packed_seq_params = DeepFeatures(
                **vars(packed_seq_params), places=places, features=[each.detach() for each in deep]
            )
            hidden = hidden.index_put((places,), first[:, None])
            hidden = _PassGradients.apply(hidden, packed_seq_params, *deep)
        rows, mask, starts, lengths = unpack_mcore_thd_tensor_for_position_ids(input_ids, packed_seq_params)
        positions, _ = self.get_rope_index(rows, (rows == token).int(), image_grid_thw, attention_mask=mask)
        return self.language_model(
            input_ids=None,
            position_ids=repack_mcore_thd_position_ids(
                positions, padded_starts=starts, lengths=lengths, total_length=input_ids.shape[1]
            ),
            attention_mask=None,
            decoder_input=hidden,
            packed_seq_params=packed_seq_params,
        )


class _Provider:
    """Builds the model, dense or mixture, from its config."""

    def provide(self: Any, *_: object, **__: object) -> DeepstackModel:
        """Build the model."""
        model = DeepstackModel(self)
        if self.freeze_vision_model:
            model.visual.requires_grad_(False)
        return model


@dataclass
class Qwen3VLProvider(_Provider, Qwen3VLModelProvider):
    """Megatron's config of Qwen3-VL."""


@dataclass
class Qwen3VLMixtureProvider(_Provider, Qwen3VLMoEModelProvider):
    """Megatron's config of Qwen3-VL whose layers are mixtures."""


class _Bridge(MegatronModelBridge):
    """The bridge's config, and its names of the language model."""

    provider_type: type[Qwen3VLProvider | Qwen3VLMixtureProvider]

    def provider_bridge(self, hf_pretrained: PreTrainedCausalLM) -> Qwen3VLProvider | Qwen3VLMixtureProvider:
        """Megatron's config for a checkpoint."""
        theirs = super().provider_bridge(hf_pretrained)
        provider = self.provider_type(**{each.name: getattr(theirs, each.name) for each in fields(theirs) if each.init})
        # The bridge (0.6) freezes mixtures.
        provider.freeze_language_model = provider.freeze_vision_model = provider.freeze_vision_projection = False
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Where each parameter is in the files."""
        theirs = super().mapping_registry().mappings
        return MegatronMappingRegistry(
            *(each for each in theirs if each.megatron_param.startswith("language_model.")),
            ReplicatedMapping("visual.**", "model.visual.**"),
        )


@MegatronModelBridge.register_bridge(
    source=Qwen3VLForConditionalGeneration, target=DeepstackModel, provider=Qwen3VLProvider, model_type="qwen3_vl"
)
class DeepstackBridge(_Bridge, Qwen3VLBridge):
    """Qwen3-VL, dense."""

    provider_type = Qwen3VLProvider


@MegatronModelBridge.register_bridge(
    source=Qwen3VLMoeForConditionalGeneration,
    target=DeepstackModel,
    provider=Qwen3VLMixtureProvider,
    model_type="qwen3_vl_moe",
)
class DeepstackMixtureBridge(_Bridge, Qwen3VLMoEBridge):
    """Qwen3-VL, mixtures. Their files have one tensor for all experts of a layer, [experts, input, output].

    The bridge (0.6) goes by shapes, both ways; ``arguments/model_files.py`` has seen to those of the files.
    """

    provider_type = Qwen3VLMixtureProvider

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Where each parameter is in the files."""
        others = (each for each in super().mapping_registry().mappings if ".experts." not in each.megatron_param)
        experts = _moe_routed_expert_mappings(
            "model.language_model.", "language_model.", experts_packed=True, transpose_on_export=True
        )
        return MegatronMappingRegistry(*others, *experts)
