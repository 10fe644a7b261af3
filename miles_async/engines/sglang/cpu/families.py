"""In the server's process, on a CPU: what SGLang (0.5.23) computes with kernels for GPUs or for AMX in some families.

Latent attention (DeepSeek-V3, Kimi-K2, GLM-4.7-Flash) reads keys and values of each head where a prompt has no cached
prefix, and torch_native finds the latent vectors in the cache instead. Here it always computes with the latent ones.
"""

from __future__ import annotations

from typing import Any

_DISPATCH = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method"


def register() -> None:
    """Patch models created from now on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_DISPATCH, _absorb, HookType.REPLACE)


def _absorb(*_: object) -> Any:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA
