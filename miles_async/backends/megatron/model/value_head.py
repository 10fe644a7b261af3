"""The critic's last layer: one number per token instead of logits."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.nn import Module, Parameter


class ValueHead(Module):
    """A vector whose product with a hidden state is the value; tensor-parallel ranks have copies of it.

    It begins at 0, and so do all values, in every layout of ranks. Called in place of the output layer it gives back
    its input, as ``return_hidden_states`` lets that do: values are made of the hidden states that need one.
    """

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden, None


def add_value_heads(modules: list[Module]) -> list[Module]:
    """Replace the output layer, on the pipeline stage that has it, and tie no embedding to it on any."""
    module: Any
    for module in modules:
        config = get_model_config(module)
        if module.post_process:
            device = next(module.parameters()).device
            module.output_layer = ValueHead(config.hidden_size, dtype=config.params_dtype, device=device)
        module.share_embeddings_and_output_weights = config.share_embeddings_and_output_weights = False
    return modules
