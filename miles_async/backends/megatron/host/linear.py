"""Linear layer that every tensor-parallel rank has whole, without Transformer Engine."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class WholeLinear(torch.nn.Linear):
    """Linear layer replicated on all tensor-parallel ranks and applied to each rank's part of the sequence."""

    tensor_model_parallel = False  # for megatron-bridge

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig, **_: object) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Returns (output, no bias)."""
        return super().forward(x), None
