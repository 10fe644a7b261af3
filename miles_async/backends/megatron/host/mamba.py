"""Stand-ins on a CPU for the kernels of mamba-ssm that Mamba-2 layers call, in plain PyTorch, since the kernels run on
GPUs only. The state of a head is a matrix S, [P, N], from which a vector c reads S c. A token first lets the state
decay, then adds its value times a vector b: S ← exp(A Δ) S + Δ v bᵀ (arXiv:2405.21060).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_async.backends.megatron.host.gated_delta import causal_conv1d
from miles_async.backends.megatron.host.padded_groups import each_alone

CHUNK = 64


class GroupNorm(torch.nn.Module):
    """RMSNorm of each group of a layer's output, as mamba-ssm's ``RMSNorm`` without a gate."""

    def __init__(self, size: int, *, eps: float, group_size: int, dtype: torch.dtype, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        self.group_size, self.eps = group_size, eps
        self.tp_group: Any = None  # the mixer's

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] → the same shape."""
        groups = x.float().unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For checkpoints: a tensor-parallel rank has a part of the groups."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        assert metadata is not None
        groups: dict[str, Any] = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets, **groups
        )
        return sharded


def patch_mixer(module: Any) -> None:
    """Put the stand-ins into ``megatron.core.ssm.mamba_mixer`` (0.19)."""
    module.HAVE_MAMBA_SSM = True
    module.ExtendedRMSNorm = GroupNorm
    module.mamba_split_conv1d_scan_combined = split_conv1d_scan
    module._check_mamba_sequence_packing_support = lambda **_: (True, None)


def patch_context_parallel(module: Any) -> None:
    """Put a stand-in for Transformer Engine into ``megatron.core.ssm.mamba_context_parallel`` (0.19)."""
    module.tex = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    module.is_te_min_version = lambda *_: True


def partitioned_indices(cu_seqlens: Tensor, tokens: int, ranks: int, rank: int) -> Tensor:
    """Indices of the tokens of a context-parallel rank: of each sequence two of 2 · ``ranks`` parts, int64."""
    places = torch.arange(tokens, device=cu_seqlens.device)
    lengths = cu_seqlens.diff().long()
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths)
    parts = (places - starts) * 2 * ranks // lengths.repeat_interleave(lengths)
    return places[(parts == rank) | (parts == 2 * ranks - 1 - rank)]


def split_conv1d_scan(
    packed: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    decay: Tensor,
    D: Tensor,  # the kernel's names
    *,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Convolution, recurrence and gate: between a layer's input projection and its norm.

    Args:
        packed: [b, T, ...]: gate z and value x, [heads · P] each, vectors b and c, [groups · N] each, and Δ, [heads].
        conv_weight: [channels, taps] for x, b and c.
        conv_bias: [channels].
        dt_bias: [heads].
        decay: A of each head, [heads], fp32.
        D: [heads], the part of x that is added to the result.
        headdim: P.
        ngroups: how many vectors b and c there are; heads share them.
        seq_idx: int [1, T], number of each token's sequence; sequences don't mix. None: b sequences.

    Returns:
        [b, T, heads · P].
    """
    heads = len(decay)
    width = heads * headdim
    state = (packed.shape[-1] - 2 * width - heads) // 2
    gate, mixed, dt = packed.split([width, width + 2 * state, heads], -1)
    boundaries = None
    if seq_idx is not None:
        counts = torch.unique_consecutive(seq_idx[0], return_counts=True)[1]
        boundaries = F.pad(counts.cumsum(0), (1, 0))
    mixed = causal_conv1d(mixed, conv_weight, conv_bias, activation="silu", cu_seqlens=boundaries)[0]
    value, key, query = mixed.float().split([width, state, state], -1)
    value = value.unflatten(-1, (heads, headdim))
    key, query = (part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, -2) for part in (key, query))
    step = F.softplus(dt.float() + dt_bias.float())
    parts = (value * step[..., None], step * decay, key, query)
    if boundaries is None:
        read = scan(*parts)
    else:
        read = each_alone(scan, [part[0] for part in parts], boundaries, like=value[0])[None]
    read = read + D.float()[:, None] * value
    return (read.flatten(-2) * F.silu(gate.float())).to(packed.dtype)


def scan(value: Tensor, decay: Tensor, key: Tensor, query: Tensor) -> Tensor:
    """The recurrence, some tokens at a time. [b, n, h, P], log decay [b, n, h], [b, n, h, N] twice → [b, n, h, P]."""
    read = []
    state: Any = None
    for parts in zip(*(part.split(CHUNK, 1) for part in (value, decay, key, query)), strict=True):
        values, since, keys, asked = (part.transpose(1, 2) for part in parts)  # [b, h, c, ...]
        since = since.cumsum(-1)
        between = (since[..., :, None] - since[..., None, :]).tril().exp().tril()
        found = (asked @ keys.mT * between) @ values
        left = (since[..., -1:] - since).exp()[..., None]
        added = (left * values).mT @ keys
        if state is not None:
            found = found + since.exp()[..., None] * (asked @ state.mT)
            added = added + since[..., -1, None, None].exp() * state
        state = added
        read.append(found)
    return torch.cat(read, 2).transpose(1, 2)
