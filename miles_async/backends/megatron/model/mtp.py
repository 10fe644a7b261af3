"""Layers for multi-token prediction (``--enable-mtp-training``): number k of them predicts the token k after the next.

They are a draft model that learns to follow the policy. As in slime, they send no gradient to the policy's hidden
states, embedding and output layer, so the policy learns as it would without them, except that gradients are clipped by
the norm over all parameters, and a step whose advantages are all 0 is made, by Adam's momentum and weight decay.

Megatron-core's (0.19) loss for them needs logits of all positions, and trains a second embedding on the last pipeline
stage. So only its layers are used. They run inside the model's forward pass, whose
output holds their hidden states after the policy's; log-probs are computed from both in the same way (``scores``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import unwrap_model
from torch import Tensor

from miles_async.backends.megatron.distributed import complete_parameters
from miles_async.backends.megatron.norms import RMSNorm

if TYPE_CHECKING:
    from megatron.bridge.models import GPTModelProvider
    from torch.nn import Module

    from miles_async.backends.megatron.platform import Platform


class AheadLayer(MultiTokenPredictionLayer):
    """One layer, for packed sequences without context parallelism."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        **_: object,
    ) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        """The tokens shifted by one. A sample's last position gets a wrong token, which no other position reads."""
        tokens = input_ids.roll(-1, -1)
        with torch.no_grad():
            embedded = embedding(tokens, position_ids)
        return tokens, position_ids, None, embedded, hidden_states  # None: no padding mask


class AheadLayers(MultiTokenPredictionBlock):
    """The layers, on the last pipeline stage."""

    embedding: Tensor | None
    """The first stage's rows of the embedding, [V / TP, H]; None if this is the first stage."""

    def forward(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, embed: Callable[..., Tensor], **settings: object
    ) -> list[Tensor]:
        """Hidden states of each layer, shaped like the policy's, which are ``hidden``."""
        hidden = hidden.detach().requires_grad_()  # else recomputed layers would have no gradient
        found = []
        for layer in self.layers:
            hidden, tokens, positions, _ = layer(
                input_ids=tokens, position_ids=positions, hidden_states=hidden, embedding=embed, **settings
            )
            found.append(hidden)
        return found


def add_ahead_layers(module: Module, provider: GPTModelProvider, count: int, platform: Platform) -> None:
    """Add ``count`` layers, built like the policy's last, to the last pipeline stage and its output.

    Call before parameters get their dtype and weights are loaded.
    """
    model: Any = module
    config = copy.copy(provider)
    config.mtp_num_layers = count  # else Megatron's model would add layers, too
    spec = _layers_spec(provider, count, platform, model.vp_stage)
    model.mtp = AheadLayers(config, spec, vp_stage=model.vp_stage, pg_collection=model.pg_collection)
    for part in model.mtp.modules():
        if hasattr(part, "router_replay"):  # engines report experts of the policy's layers only
            part.router_replay = None
    weight = None
    if not model.pre_process:
        weight = torch.zeros_like(model.output_layer.weight, requires_grad=False)
    model.mtp.register_buffer("embedding", weight, persistent=False)
    embed = model.embedding if model.pre_process else partial(_embed, model)
    plain = model._postprocess

    def postprocess(*, hidden_states: Tensor, **inputs: Any) -> Tensor:
        if model.training:
            passed = {name: inputs[name] for name in ("attention_mask", "rotary_pos_emb", "packed_seq_params")}
            later = model.mtp(hidden_states, inputs["input_ids"], inputs["position_ids"], embed, **passed)
            hidden_states = torch.cat([hidden_states, *later])
        return plain(hidden_states=hidden_states, **inputs)

    model._postprocess = postprocess


def share_embedding(modules: Sequence[Module]) -> None:
    """Update the last stage's copy of the embedding. Collective over the first and the last stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return
    first, last = unwrap_model(modules[0]), unwrap_model(modules[-1])
    if first.pre_process:
        complete_parameters(modules[:1])
        weight = first.embedding.word_embeddings.weight
    elif last.post_process:
        weight = last.mtp.embedding
    else:
        return
    group = parallel_state.get_embedding_group()
    dist.broadcast(weight.detach(), dist.get_process_group_ranks(group)[0], group=group)


def split_output(model: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Split a forward pass's output, [1, (1 + layers) · T, H], into hidden states of the policy and of each layer."""
    layers = len(model.mtp.layers) if model.training and hasattr(model, "mtp") else 0
    return hidden.chunk(1 + layers, dim=1)


def _layers_spec(
    provider: GPTModelProvider, count: int, platform: Platform, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules:
    build: Any = provider.transformer_layer_spec
    norm, linear = RMSNorm, LocalSpecProvider().column_parallel_linear()
    if platform.transformer_engine:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        norm, linear = TESpecProvider().layer_norm(), TESpecProvider().column_parallel_linear()
    layer = ModuleSpec(
        module=AheadLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=linear,
            mtp_model_layer=build(provider, vp_stage=vp_stage).layer_specs[-1],
            layer_norm=norm,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * count)


def _embed(model: Any, tokens: Tensor, _positions: Tensor) -> Tensor:
    """Embeddings of tokens [1, T] from the copy: [T, 1, H], under sequence parallelism this rank's [T / TP, 1, H]."""
    weight, group = model.mtp.embedding, parallel_state.get_tensor_model_parallel_group()
    row = tokens[0] - group.rank() * len(weight)
    inside = (row >= 0) & (row < len(weight))
    own = F.embedding(row.clamp(0, len(weight) - 1), weight) * inside[:, None]
    whole = reduce_from_tensor_model_parallel_region(own[:, None])
    return scatter_to_sequence_parallel_region(whole) if model.config.sequence_parallel else whole
