"""Memory of flash-linear-attention's kernels, which gated delta nets call on GPUs, on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.ssm.gated_delta_net import gdn
from torch import Tensor

CHUNK = 64  # tokens between two states that a backward pass computes again


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replace the kernels by functions that allocate as they do and compute nothing."""
    with (
        mock.patch.object(gdn, "chunk_gated_delta_rule", _delta_rule),
        mock.patch.object(gdn, "causal_conv1d", _convolution),
    ):
        yield


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: object) -> tuple[Any, None]:
    return _DeltaRule.apply(query, key, value, g, beta), None  # type: ignore[no-untyped-call]


def _convolution(x: Tensor, weight: Tensor, **_: object) -> tuple[Any, None]:
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
        _again = _recomputed(query, key, value)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, g, beta, _ = ctx.saved_tensors
        _again = [*_recomputed(query, key, value), *_states(query, value), torch.empty_like(value)]
        _parts = [torch.empty_like(key), torch.empty_like(key)]  # of the key's gradient
        return tuple(map(torch.empty_like, (query, key, value, g, beta)))


def _recomputed(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
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
