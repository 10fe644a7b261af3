"""Qwen2.5-VL and Qwen3-VL: transformers' vision tower and megatron-core's language model.

In place of megatron-bridge's models (0.6): Qwen3-VL's needs Transformer Engine in both towers, and Qwen2.5-VL's does
not support context parallelism.

Every tensor- and context-parallel rank of the first pipeline stage has the whole tower and runs it on all images of a
micro-batch; each puts the features of its own positions into its hidden states. With Qwen3-VL, features of several
layers of the tower are also added to the hidden states after the first layers of the language model (deepstack).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping
from megatron.bridge.models.qwen.qwen35_bridge import _moe_routed_expert_mappings
from megatron.bridge.models.qwen_vl.qwen3_vl_bridge import Qwen3VLBridge, Qwen3VLMoEBridge
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider
from megatron.bridge.models.qwen_vl.qwen25_vl_bridge import Qwen25VLBridge
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

if TYPE_CHECKING:
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from transformers import PreTrainedModel


@dataclass(kw_only=True)
class DeepFeatures(PackedSeqParams):
    """Sequences, and features to add to their hidden states after the first layers. Layers get them as an argument,
    also when they are recomputed in the backward pass.
    """

    places: Tensor  # int64 [K]: where this rank's hidden states are of image tokens
    features: Sequence[Tensor]  # of each layer, [K, H], without gradients
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of these, by layer


class _AddFeatures(torch.autograd.Function):
    """This rank's hidden states, [positions, 1, H], with the features of a layer. Keeps the gradients of these.

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
    """Passes on the first layer's input. Its backward gives ``features`` the gradients that the layers have kept."""

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


class VisionLanguageModel(MegatronModule):
    """This rank's part: a stage of the language model, and on the first one the vision tower."""

    def __init__(self, config: Provider, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> None:
        super().__init__(config=config)
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.language_model = config.provide_language_model(pre_process, post_process, vp_stage)
        # Positions cover all context-parallel ranks, whose parts megatron takes by sequences; with a group, it
        # would first take its part of the whole.
        self.language_model.rotary_pos_emb.cp_group = None
        self.share_embeddings_and_output_weights = config.share_embeddings_and_output_weights
        self.shared_embedding_or_output_weight = self.language_model.shared_embedding_or_output_weight
        if not pre_process:
            return
        self.visual = config.tower._from_config(config.vision_config)
        for parameter in self.visual.parameters():
            parameter.requires_grad_(not config.freeze_vision_model)
            # Tensor-parallel ranks' gradients are equal but for rounding, which would drive their towers apart.
            parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
        deep = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        for number, layer in enumerate(self.language_model.decoder.layers[:deep]):
            layer.register_forward_hook(_add_features(number), with_kwargs=True)

    def set_input_tensor(self, input_tensor: object) -> None:
        self.language_model.set_input_tensor(input_tensor)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams,
        image_rows: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
    ) -> Tensor:
        """``input_ids``: [1, T / CP]. ``position_ids``: [3, 1, T]. ``image_rows``: int64 [T / CP], which of the images'
        features belongs to a token, -1 if none.
        """
        hidden = None
        if self.pre_process:
            hidden = self.language_model.embedding(input_ids=input_ids, position_ids=None)  # [T / CP / SP, 1, H]
            if pixel_values is not None:
                features = self._features(pixel_values, image_grid_thw, hidden.dtype)
                if self.config.sequence_parallel:
                    # Each rank has the gradients of its own positions; their sum is the same on all.
                    features = copy_to_tensor_model_parallel_region(features)
                    image_rows = scatter_to_sequence_parallel_region(image_rows)
                [places] = (image_rows >= 0).nonzero(as_tuple=True)
                first, *deep = features[:, image_rows[places]]
                packed_seq_params = DeepFeatures(
                    **vars(packed_seq_params), places=places, features=[each.detach() for each in deep]
                )
                hidden = hidden.index_put((places,), first[:, None])
                hidden = _PassGradients.apply(hidden, packed_seq_params, *deep)
        return self.language_model(
            input_ids=None,
            position_ids=position_ids,
            attention_mask=None,
            decoder_input=hidden,
            packed_seq_params=packed_seq_params,
        )

    def _features(self, pixel_values: Tensor, grid: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Features of all image tokens, [1 + deepstack's layers, K, H]: the first replace embeddings."""
        found = self.visual(pixel_values.to(self.visual.dtype), grid_thw=grid, return_dict=True)
        return torch.stack([found.pooler_output, *getattr(found, "deepstack_features", ())]).to(dtype)


class _Provider:
    """Builds the model, dense or mixture, from its config."""

    tower: ClassVar[type[PreTrainedModel]] = Qwen3VLVisionModel

    def provide(
        self: Any, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> VisionLanguageModel:
        return VisionLanguageModel(self, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)


@dataclass
class Qwen25VLProvider(_Provider, Qwen25VLModelProvider):
    """Megatron's config of Qwen2.5-VL."""

    tower = Qwen2_5_VisionTransformerPretrainedModel


@dataclass
class Qwen3VLProvider(_Provider, Qwen3VLModelProvider):
    """Megatron's config of Qwen3-VL."""


@dataclass
class Qwen3VLMixtureProvider(_Provider, Qwen3VLMoEModelProvider):
    """Megatron's config of Qwen3-VL whose layers are mixtures."""


Provider = Qwen25VLProvider | Qwen3VLProvider | Qwen3VLMixtureProvider


class _Bridge(MegatronModelBridge):
    """The bridge's config, as the provider that a class is registered with, and names."""

    def provider_bridge(self, hf_pretrained: PreTrainedCausalLM) -> Provider:
        theirs = super().provider_bridge(hf_pretrained)
        provider: Provider = self.PROVIDER_CLASS(
            **{each.name: getattr(theirs, each.name) for each in fields(theirs) if each.init}
        )
        # The bridge (0.6) freezes mixtures.
        provider.freeze_language_model = provider.freeze_vision_model = provider.freeze_vision_projection = False
        provider.scatter_embedding_sequence_parallel = True  # each rank puts images into its own positions
        return provider


@MegatronModelBridge.register_bridge(
    source=Qwen2_5_VLForConditionalGeneration,
    target=VisionLanguageModel,
    provider=Qwen25VLProvider,
    model_type="qwen2_5_vl",
)
class WindowsBridge(_Bridge, Qwen25VLBridge):
    """Qwen2.5-VL, whose tower's attention has windows."""


class _DeepstackBridge(_Bridge):
    def mapping_registry(self) -> MegatronMappingRegistry:
        theirs = super().mapping_registry().mappings
        return MegatronMappingRegistry(
            *(each for each in theirs if each.megatron_param.startswith("language_model.")),
            ReplicatedMapping("visual.**", "model.visual.**"),
        )


@MegatronModelBridge.register_bridge(
    source=Qwen3VLForConditionalGeneration, target=VisionLanguageModel, provider=Qwen3VLProvider, model_type="qwen3_vl"
)
class DeepstackBridge(_DeepstackBridge, Qwen3VLBridge):
    """Qwen3-VL, dense."""


@MegatronModelBridge.register_bridge(
    source=Qwen3VLMoeForConditionalGeneration,
    target=VisionLanguageModel,
    provider=Qwen3VLMixtureProvider,
    model_type="qwen3_vl_moe",
)
class DeepstackMixtureBridge(_DeepstackBridge, Qwen3VLMoEBridge):
    """Qwen3-VL, mixtures. Their files have one tensor for all experts of a layer, [experts, input, output].

    The bridge (0.6) goes by shapes, both ways; ``arguments/model_files.py`` has checked the files' shapes.
    """

    def mapping_registry(self) -> MegatronMappingRegistry:
        others = (each for each in super().mapping_registry().mappings if ".experts." not in each.megatron_param)
        experts = _moe_routed_expert_mappings(
            "model.language_model.", "language_model.", experts_packed=True, transpose_on_export=True
        )
        return MegatronMappingRegistry(*others, *experts)
