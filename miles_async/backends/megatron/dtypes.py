"""In which dtype a tensor is trained and exported: --bf16 says it, except for what a model keeps in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module

# The bias of a router's choice (DeepSeek, GLM) and the decay of linear attention (Mamba, gated delta net): small steps
# between large values, which bfloat16 would swallow. transformers and SGLang keep them in fp32 too.
KEPT_IN_FP32 = frozenset({"expert_bias", "A_log"})


class MixedPrecision(Float16Module):
    """Float16Module that leaves what stays in fp32 as it was loaded.

    Float16Module (megatron-core 0.16) rounds every floating tensor; making fp32 of the rounded ones again, as megatron
    does for ``expert_bias``, does not bring the lost bits back.
    """

    def __init__(self, config: Any, module: torch.nn.Module) -> None:
        loaded = {name: tensor.data for name, tensor in kept_in_fp32(module)}
        super().__init__(config, module)
        for name, tensor in kept_in_fp32(self.module):
            tensor.data = loaded[name]


def enforce(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Every floating parameter becomes ``dtype``. Before DistributedDataParallel, whose buffers are made per dtype."""
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if _stays(name) else dtype)


def kept_in_fp32(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of ``module`` that are fp32 whatever the rest is."""
    for tensors in (module.named_parameters(), module.named_buffers()):
        yield from ((name, tensor) for name, tensor in tensors if _stays(name))


def _stays(name: str) -> bool:
    return name.rpartition(".")[2] in KEPT_IN_FP32
