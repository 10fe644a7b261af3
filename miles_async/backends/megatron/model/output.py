"""Output of the last pipeline stage: hidden states, from which logits are computed in chunks where needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.bridge.models.gemma.gemma2_provider import Gemma2OutputLayer
from megatron.bridge.models.gemma.modeling_gemma4 import Gemma4OutputLayer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor
from torch.nn import Module, Parameter

from miles_async.backends.megatron.model.mtp import split_output
from miles_async.errors import ConfigurationError


class ValueHead(Module):
    """A critic's last layer: a vector whose product with a hidden state is the value; copied to tensor-parallel ranks.

    It starts at 0, and so do all values, in every layout of ranks. Called in place of the output layer it returns its
    input, as :func:`return_hidden_states` has that do: values are made of the hidden states that need one.
    """

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden, None


def language_model(module: Module) -> Any:
    """The language model: the module itself, or a part of a vision-language model."""
    model: Any = unwrap_model(module)
    return getattr(model, "language_model", model)


def add_value_heads(modules: list[Module]) -> None:
    """Replace the output layer on the last pipeline stage, and untie the embedding on all."""
    module: Any
    for module in modules:
        config = get_model_config(module)
        if module.post_process:
            device = next(module.parameters()).device
            module.output_layer = ValueHead(config.hidden_size, dtype=config.params_dtype, device=device)
        module.share_embeddings_and_output_weights = config.share_embeddings_and_output_weights = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutput:
    """One micro-batch's output, on every tensor-parallel rank."""

    hidden: Tensor  # [T, H]; its gradients on tensor-parallel ranks are summed, except under a value head
    weight: Tensor  # [V / TP, H], this rank's rows of the output layer; [1, H] of a value head, on every rank the same
    softcap: float | None  # bound of logits (Gemma 2 and 4): they become softcap · tanh(logits / softcap)
    ahead: tuple[Tensor, ...] = ()  # hidden states of the layers for multi-token prediction, in training
    awaits_gradient: bool  # autograd must give the weight a gradient, which starts its reduction over ranks


def return_hidden_states(module: Module) -> None:
    """Make the output layer return its input. Raises ConfigurationError if logits are not a plain product."""
    layer: Any = language_model(module).output_layer
    products = (ColumnParallelLinear.forward, Gemma2OutputLayer.forward, Gemma4OutputLayer.forward)
    if type(layer).forward not in products or layer.bias is not None:
        raise ConfigurationError(
            f"the model's output layer ({type(layer).__name__}) is not the product of hidden states and a matrix that "
            "log-probs are computed from; train a model of another family"
        )
    layer.forward = lambda hidden, **_: (hidden, None)


def output_of(module: Module, hidden: Tensor) -> ModelOutput:
    """Wrap the output of a module that went through :func:`return_hidden_states`.

    ``hidden``: [1, T, H], or [1, T / TP, H] under sequence parallelism. With L layers for multi-token prediction, T is
    1 + L times as large: hidden states of the policy, then of each layer.
    """
    model = language_model(module)
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    values = isinstance(model.output_layer, ValueHead)  # whose gradients are the same on every rank

    def spread(part: Tensor) -> Tensor:
        """Prepare the input as ColumnParallelLinear does."""
        if model.config.sequence_parallel:
            return gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=not values)
        return part if values else copy_to_tensor_model_parallel_region(part)

    overlapped = isinstance(module, DistributedDataParallel) and module.ddp_config.overlap_grad_reduce
    policy, *ahead = (spread(part[0]).to(weight.dtype) for part in split_output(model, hidden))
    return ModelOutput(
        hidden=policy,
        ahead=tuple(ahead),
        weight=weight,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        awaits_gradient=overlapped,
    )
