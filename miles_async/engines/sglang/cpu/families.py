"""In the server's process, on a CPU: what SGLang (0.5.23) computes with kernels for GPUs or for AMX in some families.

Latent attention (DeepSeek-V3, Kimi-K2, GLM-4.7-Flash) reads keys and values of each head where a prompt has no cached
prefix, and torch_native finds the latent vectors in the cache instead. Here it always computes with the latent ones.
MiniMax-M2 normalises all heads of queries and keys together with a Triton kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DISPATCH = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method"
_SQUARES = "sglang.srt.models.minimax_m2.rms_sumsq_serial"
_NORM = "sglang.srt.models.minimax_m2.rms_apply_serial"


def register() -> None:
    """Patch models created from now on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_DISPATCH, _absorb, HookType.REPLACE)
    HookRegistry.register(_SQUARES, sums_of_squares, HookType.REPLACE)
    HookRegistry.register(_NORM, normalized, HookType.REPLACE)


def _absorb(*_: object) -> Any:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def sums_of_squares(queries: Tensor, keys: Tensor) -> Tensor:
    """float32 [2 B], of each row of ``queries`` [B, D] and then of ``keys`` [B, E]."""
    return torch.cat([x.float().square().sum(-1) for x in (queries, keys)])


def normalized(
    queries: Tensor,
    keys: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    squares: Tensor,
    ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of rows of which every rank has a part. ``squares``: those of ``sums_of_squares``, summed over ranks."""
    return tuple(  # type: ignore[return-value]
        (x.float() * torch.rsqrt(sums[:, None] / x.shape[-1] / ranks + eps) * weight.float()).to(x.dtype)
        for x, weight, sums in zip((queries, keys), (query_weight, key_weight), squares.chunk(2), strict=True)
    )
