"""In the server's process, on a CPU: kernels of gated delta nets (Qwen3-Next, Qwen3.5) in plain PyTorch.

SGLang (0.5.23) takes them from a build of ``sgl_kernel`` for CPUs with AMX, which is not on PyPI. These have the names
and arguments that SGLang calls them by.

The state of a head is a matrix S, [V, K], from which a query q reads S q. A token first lets the state decay, then
replaces what its key k reads by a part of its value v: S ← exp(g) S; S ← S + β (v - S k) kᵀ (arXiv:2412.06464). States
are in a pool, [slots, heads, V, K] in fp32, as are the inputs of the causal convolution before, [slots, D, taps - 1].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_async.engines.sglang.hooks import hook

CHUNK = 64

_NORMS = ("fused_norm_gate.FusedRMSNormGated", "layernorm_gated.RMSNorm")  # Qwen3-Next's, Qwen3.5's
_SHARED_EXPERT = "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul"


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: object,
) -> Tensor:
    """Convolve the new tokens of several requests, x [D, T] → [D, T], and keep the last inputs of each.

    Args:
        x: the requests' tokens one after another.
        weight: [D, taps]; the last tap is for the token itself.
        bias: [D].
        activation: "silu", "swish" or None.
        conv_states: [slots, D, taps - 1], changed in place.
        has_initial_state: bool [requests]; where it is False, nothing came before.
        cache_indices: int [requests], slots.
        query_start_loc: int [requests + 1], boundaries in T.
    """
    before, slots, starts = weight.shape[1] - 1, cache_indices.long(), query_start_loc.long()
    requests = torch.arange(len(slots)).repeat_interleave(starts.diff())
    places = torch.arange(x.shape[1]) + before * (requests + 1)  # after the kept inputs of its request and earlier ones
    inputs = x.new_empty(x.shape[1] + before * len(slots), x.shape[0])
    inputs[places] = x.T
    kept = conv_states[slots].to(x.dtype) * has_initial_state[:, None, None]
    first = (starts[:-1] + before * torch.arange(len(slots)))[:, None] + torch.arange(before)
    inputs[first] = kept.transpose(1, 2)
    last = (starts[1:] + before * torch.arange(1, len(slots) + 1))[:, None] - before + torch.arange(before)
    conv_states[slots] = inputs[last].transpose(1, 2).to(conv_states.dtype)
    windows = torch.stack([inputs[places - back] for back in range(before, -1, -1)], -1)
    return _convolve(windows, weight, bias, activation).T


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
    **_: object,
) -> Tensor:
    """As :func:`causal_conv1d_fn` for one token of each request, x [requests, D] → [requests, D]."""
    slots = conv_state_indices.long()
    windows = torch.cat([conv_state[slots].to(x.dtype), x[:, :, None]], -1)
    conv_state[slots] = windows[:, :, 1:].to(conv_state.dtype)
    return _convolve(windows, weight, bias, activation)


def _convolve(windows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """[n, D, taps] → [n, D]."""
    out = (windows.float() * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return (F.silu(out) if activation in ("silu", "swish") else out).to(windows.dtype)


def fused_gdn_gating(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay, fp32, and β of each token and head, [1, T, heads], from a and b [T, heads]."""
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: object,
) -> tuple[Tensor, None, None]:
    """Read the new tokens of several requests and update their states in place.

    Args:
        q: [1, T, key heads, K], the requests' tokens one after another; each head serves several value heads.
        k: like ``q``.
        v: [1, T, heads, V].
        g: [1, T, heads], log decay.
        beta: [1, T, heads].
        initial_state: the pool.
        initial_state_indices: int [requests], slots.
        cu_seqlens: int [requests + 1], boundaries in T.

    Returns:
        [1, T, heads, V]; no states in between.
    """
    out, slots = torch.empty_like(v[0]), initial_state_indices.long()
    for some, at, real in similar_lengths(cu_seqlens):
        query, key = _normalized(q[0][at], v.shape[2]), _normalized(k[0][at], v.shape[2])
        decay, part = (gate[0][at].float() * real[:, :, None] for gate in (g, beta))  # padding changes no state
        states = initial_state[slots[some]].float()
        read, states = _by_chunks(query, key, v[0][at].float(), decay, part, states)
        out[at[real]] = read[real].to(out.dtype)
        initial_state[slots[some]] = states.to(initial_state.dtype)
    return out[None], None, None


def similar_lengths(cu_seqlens: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batch requests whose lengths round up to the same power of two, padded on the right.

    Yields:
        The requests' numbers, int64 [b]; the places of their tokens in T, int64 [b, n]; False for padding, bool [b, n].
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    sizes = lengths.float().log2().ceil()
    for size in sizes.unique():
        some = (sizes == size).nonzero()[:, 0]
        places = torch.arange(int(lengths[some].max()))
        last = lengths[some, None] - 1
        yield some, starts[some, None] + places.minimum(last), places <= last


def _normalized(x: Tensor, heads: int) -> Tensor:
    """[..., key heads, K] → fp32 [..., heads, K] of length 1."""
    exact = x.float()
    exact = exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + 1e-6)
    return exact.repeat_interleave(heads // x.shape[-2], -2)


def _by_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence, some tokens at a time. [b, n, h, K] twice, [b, n, h, V], [b, n, h] twice, [b, h, V, K] → what the
    queries read, [b, n, h, V], and the last state.

    Within a chunk, what each token adds solves a triangular system (arXiv:2412.06464, section 3.3).
    """
    read = []
    for parts in zip(*(part.split(CHUNK, 1) for part in (query, key, value, decay, beta)), strict=True):
        asked, keys, values, since, share = (part.transpose(1, 2) for part in parts)  # [b, h, c, ...]
        since, share = since.cumsum(-1), share[..., None]
        between = (since[..., :, None] - since[..., None, :]).tril().exp().tril()
        overlap = (share * keys) @ keys.mT * between
        expected = since.exp()[..., None] * (keys @ state.mT)  # what the keys read of the state before the chunk
        added = torch.linalg.solve_triangular(overlap, share * (values - expected), upper=False, unitriangular=True)
        asked = asked * asked.shape[-1] ** -0.5
        read.append(since.exp()[..., None] * (asked @ state.mT) + (asked @ keys.mT * between) @ added)
        left = (since[..., -1:] - since).exp()[..., None]
        state = since[..., -1, None, None].exp() * state + added.mT @ (left * keys)
    return torch.cat(read, 2).transpose(1, 2), state


def fused_sigmoid_gating_delta_rule_update(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **_: object,
) -> Tensor:
    """As :func:`chunk_gated_delta_rule` for one token of each request: q, k, v of [1, requests, ...], a and b of
    [requests, heads] → [1, requests, heads, V].
    """
    slots = initial_state_indices.long()
    decay, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    query, key = (_normalized(part[0], v.shape[2])[..., None] for part in (q, k))  # [requests, heads, K, 1]
    state = initial_state_source[slots].float() * decay[0].exp()[..., None, None]
    delta = beta[0][..., None, None] * (v[0].float()[..., None] - state @ key)
    state = state + delta @ key.mT
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return (state @ query * query.shape[-2] ** -0.5)[None, ..., 0].to(v.dtype)


def rmsnorm_gated(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """RMSNorm of the last dimension, times silu of the gate."""
    normed = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (normed * F.silu(gate.float())).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous(
    qkvz: Tensor, ba: Tensor, key_heads: int, heads: int, key_size: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut Qwen3.5's projections: queries, keys and values [T, D], z [T, heads, V], b and a [T, heads]."""
    keys, values = key_heads * key_size, heads * size
    qkv, z = qkvz.split([2 * keys + values, values], -1)
    b, a = ba.chunk(2, -1)
    return qkv.contiguous(), z.reshape(-1, heads, size), b.contiguous(), a.contiguous()


def fused_qk_gemma_rmsnorm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, size: int
) -> tuple[Tensor, Tensor]:
    """Norm of each head of queries and keys, [T, heads · size] → [T · heads, size]; weights are centred at zero."""
    return _normed(q.reshape(-1, size), q_weight, eps), _normed(k.reshape(-1, size), k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, size: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`fused_qk_gemma_rmsnorm`, where each head's queries are followed by its gate, the third result."""
    q, gate = q_gate.view(-1, heads, 2 * size).chunk(2, -1)
    return *fused_qk_gemma_rmsnorm(q, k, q_weight, k_weight, eps, size), gate.reshape(-1, size).contiguous()


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], 1 + weight.float(), eps).to(x.dtype)


def fused_sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    """Multiply ``x`` by the sigmoid of the gate, in place."""
    x.mul_(gate.reshape(x.shape).float().sigmoid().to(x.dtype))


MODULE = {
    "mamba.causal_conv1d_fn_cpu": causal_conv1d_fn,
    "mamba.causal_conv1d_update_cpu": causal_conv1d_update,
    "mamba.chunk_gated_delta_rule_cpu": chunk_gated_delta_rule,
}
"""Name below ``sgl_kernel`` → function."""

OPERATORS = {
    "fused_gdn_gating_cpu": fused_gdn_gating,
    "fused_sigmoid_gating_delta_rule_update_cpu": fused_sigmoid_gating_delta_rule_update,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": fused_qkvzba_split_reshape_cat_contiguous,
    "fused_qk_gemma_rmsnorm_cpu": fused_qk_gemma_rmsnorm,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": fused_qk_gemma_rmsnorm_with_gate,
    "fused_sigmoid_mul_cpu": fused_sigmoid_mul,
}
"""Name below ``torch.ops.sgl_kernel`` → function."""


def register() -> None:
    """Replace triton kernels on a CPU without AMX: the norm of each head, the gate of a shared expert."""
    for norm in _NORMS:
        hook(f"sglang.kernels.ops.attention.fla.{norm}.forward", _gated_norm, "REPLACE")
    hook(_SHARED_EXPERT, gate_shared_expert, "REPLACE")


def _gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    assert norm.activation in ("silu", "swish"), norm.activation
    return rmsnorm_gated(x, norm.weight, gate, norm.eps)


def gate_shared_expert(hidden: Tensor, weight: Tensor, shared: Tensor, output: Tensor, *, do_add: bool) -> None:
    """Put the shared expert's output [T, H], times the sigmoid of its gate [H], into ``output``, or add it there."""
    gated = ((hidden.float() @ weight.float()).sigmoid()[:, None] * shared.float()).to(output.dtype)
    output.add_(gated) if do_add else output.copy_(gated)


def offer_operators() -> None:
    """Let SGLang's modules find the operators when they are imported."""
    for name, function in OPERATORS.items():
        setattr(torch.ops.sgl_kernel, name, function)
