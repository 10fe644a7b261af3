"""Helpers of megatron-core 0.16 that assume device tensors, Transformer Engine or a fast ``torch.compile``."""

from __future__ import annotations

import types
from typing import Any

import torch


def _patch_moe_utils(module: types.ModuleType) -> None:
    # The name stays undefined when transformer_engine is absent, and is compared with None later.
    module.__dict__.setdefault("te_general_gemm", None)

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """A tensor that is on the host already still owes its caller the numpy form."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu  # type: ignore[attr-defined]


def _patch_jit(module: types.ModuleType) -> None:
    # torch.compile of tiny pointwise helpers costs a C++ compiler run each, and needs a compiler.
    module.disable_jit_fuser()


def _patch_latent_attention(module: types.ModuleType) -> None:
    # Takes the mock objects that stand for transformer_engine's classes for the real ones: isinstance() raises.
    module.HAVE_TE = False  # type: ignore[attr-defined]


PATCHES = {
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils,
    "megatron.core.transformer.multi_latent_attention": _patch_latent_attention,
    "megatron.core.jit": _patch_jit,
}
