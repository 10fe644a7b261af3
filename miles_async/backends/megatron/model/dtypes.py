"""Dtypes of trained and exported tensors: by ``--bf16``, except for parameters that stay in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.module import Float16Module

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

# Router biases (DeepSeek, GLM) and decays of linear attention (Mamba, gated delta net) change by steps that bfloat16
# rounds away; transformers and SGLang keep them in fp32 too. Rounded lengths of DoRA's rows would change the weights.
KEPT_IN_FP32 = (".expert_bias", ".A_log", ".row_lengths")  # suffixes of parameter names


class MixedPrecision(Float16Module):
    """Float16Module that keeps fp32 parameters as loaded.

    Float16Module (megatron-core 0.16) rounds every floating tensor; casting back to fp32, as megatron does for
    ``expert_bias``, does not restore the lost bits.
    """

    def __init__(self, config: TransformerConfig, module: torch.nn.Module) -> None:
        loaded = {name: tensor.data for name, tensor in kept_in_fp32(module)}
        super().__init__(config, module)
        for name, tensor in kept_in_fp32(self.module):
            tensor.data = loaded[name]

    def forward(self, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        """Leave the output in bfloat16: hidden states, whose logits are computed in fp32."""
        return super().forward(*inputs, fp32_output=False, **kwargs)


def enforce(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast every floating parameter to ``dtype``, except for those kept in fp32.

    Call before weights are loaded, which are rounded to the layer's dtype, and before DistributedDataParallel, which
    has buffers per dtype.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if _stays(name) else dtype)


def kept_in_fp32(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """List the parameters and buffers of ``module`` that are kept in fp32."""
    for tensors in (module.named_parameters(), module.named_buffers()):
        yield from ((name, tensor) for name, tensor in tensors if _stays(name))


def _stays(name: str) -> bool:
    return name.endswith(KEPT_IN_FP32)
