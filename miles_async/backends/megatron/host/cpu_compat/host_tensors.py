"""Helpers of megatron-core 0.16 that assume device tensors or a fast ``torch.compile``."""

from __future__ import annotations

import types
from typing import Any

import torch

from miles_async.backends.megatron.host.cpu_compat.absent_modules import define_te_general_gemm


def _patch_moe_utils(module: types.ModuleType) -> None:
    define_te_general_gemm(module)

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """A tensor that is on the host already still owes its caller the numpy form."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu  # type: ignore[attr-defined]


def _patch_jit(module: types.ModuleType) -> None:
    # torch.compile of tiny pointwise helpers costs a C++ compiler run each, and needs a compiler.
    module.disable_jit_fuser()


PATCHES = {
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils,
    "megatron.core.jit": _patch_jit,
}
