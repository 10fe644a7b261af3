"""In the server's process, on a CPU: layers whose weights are float8 in blocks (``weights/fp8.py``).

SGLang (0.5.23) multiplies them on CPUs with AMX alone, where it repacks them, so that no update would fit. Here they
stay as they were loaded and are multiplied as floats; activations keep their dtype, which GPUs quantize, too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_async.engines.sglang.hooks import hook
from miles_async.runtime.float8 import dequantized

_FP8 = "sglang.srt.layers.quantization.fp8"


def register() -> None:
    """Patch the layers of models created from now on."""
    hook(f"{_FP8}.Fp8Config.get_supported_act_dtypes", _dtypes, "REPLACE")
    for layer, apply in {"Linear": linear, "MoE": mixture}.items():
        method = f"{_FP8}.Fp8{layer}Method"
        hook(f"{method}.process_weights_after_loading", _leave, "REPLACE")
        hook(f"{method}.apply", apply, "REPLACE")


def _dtypes(*_: object) -> list[torch.dtype]:
    return [torch.bfloat16, torch.float32]


def _leave(*_: object) -> None: ...


def linear(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., M] for ``x`` [..., N]."""
    return F.linear(x, _floats(method, layer, "weight", x.dtype), bias)


def mixture(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """The sum of the chosen experts' outputs."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    weights = {name: _floats(method, layer, name, x.dtype) for name in ("w13_weight", "w2_weight")}
    experts = SimpleNamespace(num_experts=len(layer.w13_weight), **weights)
    return StandardCombineInput(moe_forward_native(experts, x, dispatch_output.topk_output, method.moe_runner_config))


def _floats(method: Any, layer: Any, name: str, dtype: torch.dtype) -> Tensor:
    values, scales = getattr(layer, name), getattr(layer, f"{name}_scale_inv")
    return dequantized(values, scales, method.weight_block_size).to(dtype)
