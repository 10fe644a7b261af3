"""Memory of the kernels that layers call on GPUs, on fake tensors.

The kernels of flash-linear-attention (gated delta nets) and mamba-ssm (Mamba-2) are replaced by allocations. Megatron's
sparse attention (DeepSeek-V3.2, GLM-5) is plain PyTorch, which takes less time here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import gdn
from megatron.core.transformer.experimental_attention_variant import dsa_masking
from torch import Tensor

CHUNK = 64  # tokens between two states of a gated delta net that a backward pass computes again

_scatter = dsa_masking.scatter_topk_into_index_mask


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replace the kernels by functions that allocate as they do and compute nothing."""
    with (
        mock.patch.object(gdn, "chunk_gated_delta_rule", delta_rule),
        mock.patch.object(gdn, "causal_conv1d", convolution),
        mock.patch.object(mamba_mixer, "mamba_split_conv1d_scan_combined", split_scan),
        mock.patch.object(dsa_masking, "scatter_topk_into_index_mask", _first_rows),
    ):
        yield


def delta_rule(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: object) -> tuple[Any, None]:
    return _DeltaRule.apply(query, key, value, g, beta), None  # type: ignore[no-untyped-call]


def convolution(x: Tensor, weight: Tensor, **_: object) -> tuple[Any, None]:
    return _Convolution.apply(x, weight), None  # type: ignore[no-untyped-call]


class _DeltaRule(torch.autograd.Function):
    """Allocates as ``ChunkGatedDeltaRuleFunction`` of flash-linear-attention 0.4.

    Query and key [B, T, heads, d], value [B, T, heads, e], log decay and beta [B, T, heads] → [B, T, heads, e].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        batch, tokens, heads, _ = query.shape
        inverse = key.new_empty(batch, tokens, heads, CHUNK)
        ctx.save_for_backward(query, key, value, torch.empty_like(g), beta, inverse)
        _again = _rule_again(query, key, value)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, g, beta, _ = ctx.saved_tensors
        _again = [*_rule_again(query, key, value), *_states(query, value), torch.empty_like(value)]
        _parts = [torch.empty_like(key), torch.empty_like(key)]  # of the key's gradient
        return tuple(map(torch.empty_like, (query, key, value, g, beta)))


def _rule_again(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Weighted keys, values before and after the correction by earlier ones, and states."""
    return [torch.empty_like(key), torch.empty_like(value), torch.empty_like(value), *_states(query, value)]


def _states(query: Tensor, value: Tensor) -> list[Tensor]:
    """One state [heads, d, e] at the beginning of each chunk."""
    batch, tokens, heads, width = query.shape
    return [query.new_empty(batch, -(-tokens // CHUNK), heads, width, value.shape[-1])]


class _Convolution(torch.autograd.Function):
    """Allocates as ``CausalConv1dFunction``: x [B, T, D] and weight [D, taps] → [B, T, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def split_scan(packed: Tensor, *parameters: Tensor, headdim: int, ngroups: int, chunk_size: int, **_: object) -> Any:
    """``parameters``: taps and bias of the convolution, bias of Δ, A and D."""
    return _Scan.apply(packed, *parameters, headdim, ngroups, chunk_size)  # type: ignore[no-untyped-call]


class _Scan(torch.autograd.Function):
    """Allocates as ``MambaSplitConv1dScanCombinedFn`` of mamba-ssm 2: packed [B, T, ...] → [B, T, heads · P]."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, *arguments: Any) -> Tensor:
        *parameters, size, ctx.groups, ctx.chunk = arguments
        width = len(parameters[-1]) * size
        ungated = packed.new_empty(*packed.shape[:2], width)
        ctx.save_for_backward(packed, *parameters, ungated)
        _again = _scan_again(packed, parameters[0], width, ctx.groups, ctx.chunk)
        return torch.empty_like(ungated)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        packed, *parameters, ungated = ctx.saved_tensors
        mixed, *parts = _scan_again(packed, parameters[0], ungated.shape[-1], ctx.groups, ctx.chunk)
        # Gradients: of what went into the recurrence, of its output, of states and products.
        _gradients = [torch.empty_like(each) for each in (mixed, ungated, *parts)]
        return (torch.empty_like(packed), *map(torch.empty_like, parameters), None, None, None)


def _scan_again(packed: Tensor, taps: Tensor, width: int, groups: int, chunk: int) -> list[Tensor]:
    """The convolution's output; in fp32, by chunk: one state per head, before and after earlier ones are added, and
    products of all pairs of tokens per group.
    """
    batch, tokens, _ = packed.shape
    chunks, state = -(-tokens // chunk), (len(taps) - width) // groups // 2
    states = packed.new_empty(batch, chunks, width, state, dtype=torch.float32)
    products = packed.new_empty(batch, chunks, groups, chunk, chunk, dtype=torch.float32)
    return [packed.new_empty(batch, tokens, len(taps)), states, torch.empty_like(states), products]


def _first_rows(index_mask: Tensor, topk_indices: Tensor, *, seq_chunk_size: int = 256) -> None:
    """Mark the chosen tokens of the first rows only: later rows are processed in sequence, and each frees its memory.
    Most operations of a layer are for these rows, and with fake tensors all take equally long.
    """
    _scatter(index_mask[:, :seq_chunk_size], topk_indices[:, :seq_chunk_size], seq_chunk_size=seq_chunk_size)
