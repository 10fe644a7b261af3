"""Stand-ins on a CPU for the kernels of flash-linear-attention that gated delta nets call, in plain PyTorch, since the
kernels run on GPUs only. megatron-core (0.19) has a fallback for deterministic runs, which refuses packed sequences;
here it gets batches of sequences of similar length.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_async.backends.megatron.host.padded_groups import each_alone

LONGEST_CHUNK = 64


def patch(module: Any) -> None:
    """Put the stand-ins into ``megatron.core.ssm.gated_delta_net.common``, from which the layers import them."""
    rule = module.torch_chunk_gated_delta_rule

    def chunk_gated_delta_rule(
        query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, **_: object
    ) -> tuple[Tensor, None]:
        """Query and key [1, T, heads, d], value [1, T, heads, e], log decay and beta [1, T, heads] → [1, T, heads, e].

        Without ``cu_seqlens`` the first dimension may be a batch. No state goes in or comes out.
        """
        parts = (query, key, value, g, beta)
        if cu_seqlens is None:
            return _by_chunks(rule, *parts), None
        packed = [part[0] for part in parts]
        return each_alone(partial(_by_chunks, rule), packed, cu_seqlens, like=value[0])[None], None

    module.HAVE_FLA = True
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    module.causal_conv1d, module.l2norm = causal_conv1d, l2norm


def _by_chunks(rule: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    longest = query.shape[1]
    chunk = min(LONGEST_CHUNK, 1 << (longest - 1).bit_length())
    found: Tensor = rule(query, key, value, g, beta, chunk_size=chunk)[0]
    return found


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Convolve each channel with its own taps, the last of which is for the token itself; sequences don't mix.

    Args:
        x: [b, T, D]; with ``cu_seqlens`` [1, T, D].
        weight: [D, taps].
        bias: [D].
        activation: "silu", "swish" or None.
        cu_seqlens: int [S + 1], boundaries of the sequences in T.

    Returns:
        [b, T, D], and no state.
    """
    tokens, taps = x.shape[1], weight.shape[1]
    depths = torch.arange(tokens, device=x.device)
    if cu_seqlens is not None:
        depths = depths - cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    out = x * weight[:, -1] if bias is None else x * weight[:, -1] + bias
    for back in range(1, min(taps, tokens)):
        earlier = F.pad(x, (0, 0, back, 0))[:, :tokens]
        out = out + earlier * weight[:, -1 - back] * (depths >= back)[:, None]
    return F.silu(out) if activation in ("silu", "swish") else out, None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x`` divided by its length in the last dimension, computed in fp32."""
    exact = x.float()
    return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
