"""Causal attention without Transformer Engine, for batches, packed sequences and context parallelism.

megatron-core's own attention refuses packed sequences. This one is plain PyTorch, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from miles_async.backends.megatron.host.padded_groups import PaddedGroup, padded_groups
from miles_async.backends.megatron.packing.positions import gathered_order
from miles_async.backends.megatron.packing.shared_prefixes import SharedPrefixes


class SdpaAttention(MegatronModule):
    """Causal attention by ``scaled_dot_product_attention``, for [s, b, h, d] batches and packed [t, h, d] sequences.

    Layers may be limited to a window of the last tokens. Softcapping of scores (Gemma 2) and sinks, a learned score per
    head that takes a share of attention (gpt-oss), materialize all scores.
    """

    sharded_state_dict = DotProductAttention.sharded_state_dict

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: object
    ) -> None:
        super().__init__(config=config)
        self.tp_group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
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
        for group in _groups(packed_seq_params):
            attended = self._attend(query[group.queries], key[group.keys], value[group.keys], group.depths)
            out = out.index_put((group.queries[group.valid],), attended[group.valid])
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

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, depths: Tensor | None = None) -> Tensor:
        """[b, q, h, d], [b, k, h, d], [b, k, h, d] → [b, q, h, d].

        ``depths``: int64 [b, q], positions of the queries among the k tokens; None: the last ones.
        """
        width = value.shape[-1]
        if width < key.shape[-1]:  # latent attention; only equal widths get a kernel that keeps no scores [q, k]
            value = F.pad(value, (0, key.shape[-1] - width))
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        plain = self.softcap is not None or self.softmax_offset is not None
        out = self._plain(query, key, value, depths) if plain else self._fused(query, key, value, depths)
        return out[..., :width].transpose(1, 2)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, depths: Tensor | None) -> Tensor:
        """[b, h, q, d], [b, g, k, d], [b, g, k, d] → [b, h, q, d]."""
        queries, keys = query.shape[2], key.shape[2]
        mask = None if queries == keys else causal_lower_right(queries, keys)
        if depths is not None or (self.before is not None and self.before < keys - 1):
            mask = self._visible(queries, keys, depths, query.device)
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

    def _plain(self, query: Tensor, key: Tensor, value: Tensor, depths: Tensor | None) -> Tensor:
        """As :meth:`_fused`, with softcapped scores and sinks."""
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        scores = query @ key.transpose(2, 3) * (self.softmax_scale or query.shape[-1] ** -0.5)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~self._visible(query.shape[2], key.shape[2], depths, query.device), -torch.inf)
        if self.softmax_offset is not None:
            sinks = self.softmax_offset.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        shares = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
        return F.dropout(shares, self.dropout, self.training) @ value

    def _visible(self, queries: int, keys: int, depths: Tensor | None, device: torch.device) -> Tensor:
        """Which keys each query sees, bool [b, 1, q, k], where b may be 1."""
        if depths is None:
            depths = torch.arange(keys - queries, keys, device=device)[None]
        distance = depths[:, None, :, None] - torch.arange(keys, device=device)
        return (distance >= 0) & (distance <= (keys if self.before is None else self.before))


AutoMapping.register_module_type(SdpaAttention.__name__, "column")  # of its only parameter, the sinks


def _groups(packed: PackedSeqParams) -> Iterator[PaddedGroup]:
    if isinstance(packed, SharedPrefixes):
        for group in padded_groups(packed.samples, packed.own):
            yield replace(group, queries=packed.places[group.queries], keys=packed.places[group.keys])
        return
    yield from padded_groups(packed.cu_seqlens_q)
