"""In the server's process, on a CPU: kernels of Mamba-2 layers, and mixtures, of Nemotron-H in plain PyTorch.

SGLang (0.5.23) takes them from triton, and has experts without a gate on GPUs only. These have the names and arguments
that SGLang calls them by.

The state of a head is a matrix S, [P, N], from which a vector c reads S c. A token first lets the state decay, then
adds its value times a vector b: S ← exp(A Δ) S + Δ v bᵀ (arXiv:2405.21060). States are in a pool, [slots, heads, P, N].
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_async.engines.sglang.cpu.gated_delta import CHUNK, causal_conv1d_fn, causal_conv1d_update, similar_lengths
from miles_async.engines.sglang.hooks import hook

_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_MIXTURE = "sglang.srt.models.nemotron_h.NemotronHMoE._forward_core_normal"
_EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"


def register() -> None:
    """Patch models created from now on."""
    hook(f"{_MIXER}.MambaMixer2.__init__", _with_kernels)
    hook(_MIXTURE, _mixture, "REPLACE")
    hook(_EXPERTS, _experts)


def _with_kernels(original: Any, *args: Any, **kwargs: Any) -> None:
    module: Any = sys.modules[_MIXER]  # on a CPU it imports no convolution, so that there is no name to hook
    module.causal_conv1d_fn_triton, module.causal_conv1d_update_triton = causal_conv1d_fn, causal_conv1d_update
    module.mamba_chunk_scan_combined, module.selective_state_update = chunk_scan, state_update
    original(*args, **kwargs)


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    B: Tensor,  # SGLang's names
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_states: Tensor | None,
    out: Tensor,
    state_dtype: torch.dtype,
    **_: object,
) -> tuple[None, Tensor, None]:
    """Read the new tokens of several requests.

    Args:
        x: [1, T, heads, P], the requests' tokens one after another.
        dt: [1, T, heads], before its bias and softplus.
        decay: A of each head, [heads].
        B: [1, T, groups, N]; heads share a group.
        C: like ``B``.
        D: [heads], the part of x that is added to the result.
        dt_bias: [heads].
        cu_seqlens: int [requests + 1], boundaries in T.
        initial_states: [requests, heads, P, N]; None: nothing came before.
        out: [1, T, heads, P], filled in place.
        state_dtype: dtype of the states.

    Returns:
        No states in between, and the last ones, [requests, heads, P, N].
    """
    heads, groups = x.shape[2], B.shape[2]
    shape = (len(cu_seqlens) - 1, heads, x.shape[3], B.shape[3])
    states = torch.zeros(shape) if initial_states is None else initial_states.float()
    step = F.softplus(dt[0].float() + dt_bias.float())
    for some, at, real in similar_lengths(cu_seqlens):
        steps, values = step[at] * real[:, :, None], x[0][at].float()  # padding changes no state
        key, query = (part[0][at].float().repeat_interleave(heads // groups, -2) for part in (B, C))
        read, states[some] = _by_chunks(values * steps[..., None], steps * decay.float(), key, query, states[some])
        read += D.float()[:, None] * values
        out[0, at[real]] = read[real].to(out.dtype)
    return None, states.to(state_dtype), None


def _by_chunks(value: Tensor, decay: Tensor, key: Tensor, query: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, some tokens at a time. [b, n, h, P], log decay [b, n, h], [b, n, h, N] twice, [b, h, P, N] → what
    is read, [b, n, h, P], and the last state.
    """
    read = []
    for parts in zip(*(part.split(CHUNK, 1) for part in (value, decay, key, query)), strict=True):
        values, since, keys, asked = (part.transpose(1, 2) for part in parts)  # [b, h, c, ...]
        since = since.cumsum(-1)
        between = (since[..., :, None] - since[..., None, :]).tril().exp().tril()
        read.append(since.exp()[..., None] * (asked @ state.mT) + (asked @ keys.mT * between) @ values)
        left = (since[..., -1:] - since).exp()[..., None]
        state = since[..., -1, None, None].exp() * state + (left * values).mT @ keys
    return torch.cat(read, 2).transpose(1, 2), state


def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    dt_bias: Tensor,
    state_batch_indices: Tensor,
    out: Tensor,
    **_: object,
) -> None:
    """As :func:`chunk_scan` for one token of each request: x [requests, heads, P], B and C [requests, groups, N]. What
    is one number per head comes expanded: dt [requests, heads, P], decay [heads, P, N], D and dt_bias [heads, P].
    """
    slots, each = state_batch_indices.long(), x.shape[1] // B.shape[1]
    step = F.softplus(dt.float() + dt_bias.float())
    key, query = (part.float().repeat_interleave(each, 1)[:, :, None] for part in (B, C))
    added = (step * x.float())[..., None] * key
    held = state[slots].float() * (step[..., None] * decay.float()).exp() + added
    state[slots] = held.to(state.dtype)
    out.copy_((held * query).sum(-1) + D.float() * x.float())


def _mixture(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """Outputs of routed experts and of shared ones. SGLang's has a product of two dtypes that a CPU lacks."""
    logits = F.linear(hidden.float(), layer.gate.weight.float())
    shared = None if layer.shared_experts is None else layer.shared_experts(hidden)
    chosen = layer.topk(hidden, logits)
    routed = layer._apply_fc1_latent_proj(hidden) if layer.use_latent_moe else hidden
    return layer.experts(routed, chosen) * layer.routed_scaling_factor, shared


def _experts(original: Any, layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
    if config.activation != "relu2":
        return original(layer, x, topk_output, config)  # type: ignore[no-any-return]
    weights, chosen, _ = topk_output
    return squared_relu_experts(x, layer.w13_weight, layer.w2_weight, weights, chosen)


def squared_relu_experts(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Experts without a gate. x [T, H], up [e, F, H], down [e, H, F], weights and chosen experts [T, k] → [T, H]."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        found = F.linear(F.relu(F.linear(x[tokens], up[expert])).square(), down[expert])
        out.index_add_(0, tokens, found.float() * weights[tokens, places, None].float())
    return out.to(x.dtype)
