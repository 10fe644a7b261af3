"""In the server's process, on a CPU: what SGLang (0.5.23) and transformers (5.19) lack there, a few lines each.

- Latent attention (DeepSeek-V3, Kimi-K2, GLM-4.7-Flash) reads keys and values of each head where a prompt has no cached
  prefix, and torch_native finds the latent vectors in the cache instead. Here it always computes with the latent ones.
- MiniMax-M2 normalises all heads of queries and keys together with a Triton kernel.
- Gemma 4 keeps layers with a window in a separate cache, which SGLang's torch_native writes and does not read;
  ``attention`` reads it, so that SGLang need not refuse. The scale of its routers is left out without a GPU.
- With ``--ep-size`` a rank marks experts of other ranks with -1, which the native mixture takes for an index.
- With data-parallel attention, outputs of experts are added up and handed out by NCCL alone.
- The experts of ``--enable-return-routed-experts`` are kept in memory that is registered with CUDA on every device.
- Without torchvision, transformers has processors of images, but none of videos, and so no processor of any model that
  could read a video.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_async.arguments.model_files import read_config
from miles_async.engines.sglang.hooks import hook

EXPERTS_FLAG = "--enable-return-routed-experts"

_DISPATCH = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method"
_CHECK = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
_ROUTER = "sglang.srt.models.gemma4_causal.Gemma4Router.forward"
_SQUARES = "sglang.srt.models.minimax_m2.rms_sumsq_serial"
_NORM = "sglang.srt.models.minimax_m2.rms_apply_serial"
_EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
_SCATTER = "sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatterv"
_PIN = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"


def register(arguments: Sequence[str]) -> None:
    """Patch models, buffers and processors created from now on, in a server with these arguments."""
    from transformers.processing_utils import ProcessorMixin
    from transformers.utils.import_utils import is_torchvision_available

    hook(_DISPATCH, _absorb, "REPLACE")
    hook(_CHECK, _let_gemma4_pass)
    hook(_ROUTER, route, "REPLACE")
    hook(_SQUARES, sums_of_squares, "REPLACE")
    hook(_NORM, normalized, "REPLACE")
    hook(_EXPERTS, own_experts)
    hook(_SCATTER, _scatter, "REPLACE")
    if EXPERTS_FLAG in arguments:
        hook(_PIN, _leave, "REPLACE")
    if not is_torchvision_available():
        ProcessorMixin.get_attributes = classmethod(without_videos(ProcessorMixin.get_attributes.__func__))


def _absorb(*_: object) -> Any:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def _let_gemma4_pass(check: Any, arguments: Any) -> Any:
    if read_config(Path(arguments.model_path)).get("model_type") != "gemma4_text":
        return check(arguments)
    from sglang.srt.arg_groups import model_hook

    # The name of a backend that reads both caches, in place of torch_native.
    with mock.patch.object(model_hook, "attention_backends_of", return_value=("intel_amx", "intel_amx")):
        return check(arguments)


def route(router: Any, x: Tensor) -> Tensor:
    """Scores of experts, [tokens, experts], of what goes into the layer, [tokens, width]."""
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=router.norm.eps).to(x.dtype)
    scores: Tensor = router.proj(normed * router.scale * router.root_size)[0]
    return scores


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
    """RMSNorm of rows that are split over ranks. ``squares``: ``sums_of_squares`` summed over ranks."""
    return tuple(  # type: ignore[return-value]
        (x.float() * torch.rsqrt(sums[:, None] / x.shape[-1] / ranks + eps) * weight.float()).to(x.dtype)
        for x, weight, sums in zip((queries, keys), (query_weight, key_weight), squares.chunk(2), strict=True)
    )


def own_experts(compute: Any, layer: Any, x: Tensor, chosen: Any, config: Any) -> Tensor:
    """This rank's part of a mixture's output, [tokens, width]: ``compute`` for the experts that are here, one each."""
    if bool((chosen.topk_ids >= 0).all()):
        return compute(layer, x, chosen, config)  # type: ignore[no-any-return]
    tokens, places = (chosen.topk_ids >= 0).nonzero(as_tuple=True)
    result = torch.zeros_like(x, dtype=torch.float32)
    if len(tokens):
        here = {name: getattr(chosen, name)[tokens, places, None] for name in ("topk_weights", "topk_ids")}
        result.index_add_(0, tokens, compute(layer, x[tokens], chosen._replace(**here), config).float())
    return result.to(x.dtype)


def _scatter(group: Any, input_: Tensor, output: Tensor | None = None, sizes: list[int] | None = None) -> Tensor:
    return group._deterministic_reduce_scatterv(input_, output, sizes)  # type: ignore[no-any-return]


def _leave(*_: object) -> None: ...


def without_videos(names: Any) -> Any:
    """The class method ``names``, without the processor of videos."""
    return lambda cls: [name for name in names(cls) if name != "video_processor"]
