"""Dtypes of trained and exported tensors: by ``--bf16``, except for parameters that stay in fp32."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import Float16Module

# Decays of linear attention (Mamba, gated delta net) change by steps that bfloat16 rounds away; transformers and SGLang
# keep them in fp32 too, as megatron-bridge does router biases. Rounded lengths of DoRA's rows would change the weights.
KEPT_IN_FP32 = (".A_log", ".row_lengths")  # suffixes of parameter names


class MixedPrecision(Float16Module):
    """Float16Module whose output stays in bfloat16: hidden states, whose logits are computed in fp32."""

    def forward(self, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*inputs, fp32_output=False, **kwargs)


def enforce(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast every floating parameter to ``dtype``, except for those kept in fp32.

    Call before weights are loaded, which are rounded to the layer's dtype, and before DistributedDataParallel, which
    has buffers per dtype.
    """
    for path, part in module.named_modules():
        parameters = {f"{path}.{name}": each for name, each in part.named_parameters(recurse=False)}
        for name, parameter in parameters.items():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.float32 if name.endswith(KEPT_IN_FP32) else dtype)
        if kept := tuple(name.rpartition(".")[2] for name in parameters if name.endswith(KEPT_IN_FP32)):
            part._keep_in_float32_parameter_names = kept  # type: ignore[assignment]  # megatron-bridge (0.6) casts, too
