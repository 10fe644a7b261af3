"""Causal attention without Transformer Engine, for batches, packed sequences and context parallelism.

megatron-core's own attention refuses packed sequences. This one is plain PyTorch, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from miles_async.backends.megatron.context_split import gathered_order
from miles_async.backends.megatron.shared_prompts import SharedPrompts


class SdpaAttention(MegatronModule):
    """Causal attention by ``scaled_dot_product_attention``, for [s, b, h, d] batches and packed [t, h, d] sequences.

    Layers may see a window of the last tokens only. Softcapping of scores (Gemma 2) and sinks, a learned score per head
    that takes its share of attention (gpt-oss), are computed plainly: they take the memory of all scores.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: object
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.before: int | None = config.window_size[0] if windowed else None  # tokens before a token that it sees
        self.softcap: float | None = getattr(config, "attn_logit_softcapping", None)
        self.softmax_offset: Tensor | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Returns [s, b, h · d], or [t, h · d] for packed sequences. ``attention_mask`` is unused: always causal."""
        if packed_seq_params is None:
            out = self._attend(*(tensor.transpose(0, 1) for tensor in (query, key, value))).transpose(0, 1)
            return out.reshape(*out.shape[:2], -1)
        if self.config.context_parallel_size > 1:
            return self._attend_split(query, key, value, packed_seq_params.cu_seqlens_q)
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for index, valid in _samples(packed_seq_params):
            group = self._attend(query[index], key[index], value[index])
            out = out.index_put((index[valid],), group[valid])
        return out.reshape(out.shape[0], -1)

    def _attend_split(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
        """This rank's part of the queries against keys and values of all context-parallel ranks."""
        context = parallel_state.get_context_parallel_group()
        size, rank = context.size(), context.rank()
        boundaries = cu_seqlens.tolist()
        order = torch.from_numpy(gathered_order(boundaries, size)).to(key.device)
        key, value = (gather_from_sequence_parallel_region(tensor, group=context)[order] for tensor in (key, value))
        parts = []
        for start, end in pairwise(boundaries):
            chunk = (end - start) // (2 * size)
            for half, place in enumerate((rank, 2 * size - 1 - rank)):
                own, seen = start // size + half * chunk, start + (place + 1) * chunk
                part = (query[own : own + chunk], key[start:seen], value[start:seen])
                if chunk:
                    parts.append(self._attend(*(tensor[None] for tensor in part))[0])
        return torch.cat(parts).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, q, h, d], [b, k, h, d], [b, k, h, d] → [b, q, h, d]. The queries are those of the last of k tokens."""
        width = value.shape[-1]
        if width < key.shape[-1]:  # latent attention; only equal widths get a kernel that keeps no scores [q, k]
            value = F.pad(value, (0, key.shape[-1] - width))
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        plain = self.softcap is not None or self.softmax_offset is not None
        out = self._plain(query, key, value) if plain else self._fused(query, key, value)
        return out[..., :width].transpose(1, 2)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, h, q, d], [b, g, k, d], [b, g, k, d] → [b, h, q, d]."""
        queries, keys = query.shape[2], key.shape[2]
        mask = None if queries == keys else causal_lower_right(queries, keys)
        if self.before is not None and self.before < keys - 1:
            mask = self._visible(queries, keys, query.device)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _plain(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As :meth:`_fused`, with softcapped scores and sinks."""
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        scores = query @ key.transpose(2, 3) * (self.softmax_scale or query.shape[-1] ** -0.5)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~self._visible(query.shape[2], key.shape[2], query.device), -torch.inf)
        if self.softmax_offset is not None:
            sinks = self.softmax_offset.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        shares = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
        return F.dropout(shares, self.dropout, self.training) @ value

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Sinks are split over tensor-parallel ranks, as in megatron's own attention."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )

    def _visible(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Which keys each query sees, bool [q, k]; the queries are those of the last of k tokens."""
        distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
        return (distance >= 0) & (distance <= (keys if self.before is None else self.before))


AutoMapping.register_module_type(SdpaAttention.__name__, "column")  # of its only parameter, the sinks


def _samples(packed: PackedSeqParams) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples as right-padded batches: (position [b, s], whether its output is taken from here [b, s] bool)."""
    if not isinstance(packed, SharedPrompts):
        yield from padded_groups(packed.cu_seqlens_q)
        return
    for index, valid in padded_groups(packed.samples):
        yield packed.places[index], valid & packed.first[index]


def padded_groups(cu_seqlens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Packed sequences of similar length as right-padded batches: (token index [b, s], valid [b, s] bool).

    Sequences are grouped by the next power of two of their length, so that few attention calls are made and at
    most half of a batch is padding. Padding stands to the right, where causal attention never looks.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    buckets = torch.where(lengths > 0, lengths.float().log2().ceil().long(), -1)
    for bucket in buckets.unique().tolist():
        if bucket < 0:
            continue
        chosen = buckets == bucket
        start, length = starts[chosen, None], lengths[chosen, None]
        position = torch.arange(int(length.max()), device=cu_seqlens.device)
        yield start + position.minimum(length - 1), position < length
