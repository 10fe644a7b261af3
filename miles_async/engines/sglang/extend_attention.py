"""In the server's process: attention on a CPU is computed for new tokens only, not for those in the cache again.

SGLang (0.5.23) computes the attention of all tokens of a request whose prompt is extended, in every layer, and throws
away that of cached ones. With 128 requests of 130 tokens, all but one of them cached, that takes five times as long for
a layer of SmolLM2-135M (docs/benchmarks.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


@cache  # a server that is forked from a process which has imported the launcher imports it again
def register() -> None:
    """Let the backends made from now on do so."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_extend", _extend, HookType.AROUND)


def _extend(original: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    *tensors, encoder_lens = args
    if encoder_lens is not None or not kwargs["causal"]:  # tokens look at an encoder's, or ahead
        return original(backend, *args, **kwargs)
    return extend(
        *tensors,
        scaling=kwargs["scaling"],
        enable_gqa=kwargs["enable_gqa"],
        sliding_window_size=kwargs["sliding_window_size"],
    )


def extend(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    *,
    scaling: float | None,
    enable_gqa: bool,
    sliding_window_size: int | None,
) -> Tensor:
    """Fill ``output`` and return it. Arguments are those of SGLang's ``_run_sdpa_forward_extend``: ``query`` holds the
    new tokens of all requests one after another, the caches also these tokens' keys and values.
    """
    first = 0
    lengths = zip(extend_prefix_lens.tolist(), extend_seq_lens.tolist(), seq_lens.tolist(), strict=True)
    for row, (cached, new, length) in zip(req_pool_indices.tolist(), lengths, strict=True):
        positions = req_to_token[row, :length]
        keys, values = (held[positions].to(query.dtype).transpose(0, 1) for held in (k_cache, v_cache))
        sees = _seen(cached, new, sliding_window_size)
        mixed = scaled_dot_product_attention(
            query[None, first : first + new].transpose(1, 2),
            keys[None],
            values[None],
            attn_mask=sees,
            is_causal=sees is None,
            scale=scaling,
            enable_gqa=enable_gqa,
        )
        output[first : first + new] = mixed[0].transpose(0, 1)
        first += new
    return output


def _seen(cached: int, new: int, window: int | None) -> Tensor | None:
    """Which tokens each new one sees, bool [new, cached + new]; None: itself and all before it, none of them cached."""
    if cached == 0 and window is None:
        return None  # a long prompt's would be large
    seen = torch.ones(new, cached + new, dtype=torch.bool).tril(cached)
    return seen if window is None else seen.triu(cached - window)
