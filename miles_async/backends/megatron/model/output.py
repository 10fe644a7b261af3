"""Output of the model's last pipeline stage: hidden states, of which logits are made a few at a time where needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.bridge.models.gemma.gemma2_provider import Gemma2OutputLayer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import unwrap_model
from torch import Tensor

from miles_async.backends.megatron.model.mtp import split_output
from miles_async.backends.megatron.model.value_head import ValueHead
from miles_async.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.nn import Module


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutput:
    """One micro-batch's output, on every tensor-parallel rank."""

    hidden: Tensor  # [T, H]; its gradients on tensor-parallel ranks are summed, except under a value head
    weight: Tensor  # [V / TP, H], this rank's rows of the output layer; [1, H] of a value head, on every rank the same
    softcap: float | None  # bound of logits (Gemma 2): softcap · tanh(logits / softcap) are what counts
    ahead: tuple[Tensor, ...] = ()  # hidden states of the layers for multi-token prediction, in training
    awaits_gradient: bool  # autograd has to give the weight a gradient, at which its reduction over ranks begins


def return_hidden_states(module: Module) -> None:
    """Let the model's output layer give back its input. Raises ConfigurationError if logits are no plain product."""
    layer: Any = module.output_layer
    if type(layer).forward not in (ColumnParallelLinear.forward, Gemma2OutputLayer.forward) or layer.bias is not None:
        raise ConfigurationError(
            f"the model's output layer ({type(layer).__name__}) is not the product of hidden states and a matrix that "
            "log-probs are computed from; train a model of another family"
        )
    layer.forward = lambda hidden, **_: (hidden, None)


def output_of(module: Module, hidden: Tensor) -> ModelOutput:
    """Wrap what a module returned that went through :func:`return_hidden_states`.

    ``hidden``: [1, T, H], or [1, T / TP, H] under sequence parallelism. With L layers for multi-token prediction T is
    1 + L times as large: the policy's hidden states come first, then those of each layer.
    """
    model: Any = unwrap_model(module)
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    if isinstance(model.output_layer, ValueHead):  # on every rank the same, and so is the gradient
        spread = _gather_equal if model.config.sequence_parallel else _same
    else:  # what ColumnParallelLinear does with its input
        spread = gather_from_sequence_parallel_region if model.config.sequence_parallel else _copy
    overlapped = isinstance(module, DistributedDataParallel) and module.ddp_config.overlap_grad_reduce
    policy, *ahead = (spread(part[0]).to(weight.dtype) for part in split_output(model, hidden))
    return ModelOutput(
        hidden=policy,
        ahead=tuple(ahead),
        weight=weight,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        awaits_gradient=overlapped,
    )


def _copy(hidden: Tensor) -> Tensor:
    return copy_to_tensor_model_parallel_region(hidden)


def _same(hidden: Tensor) -> Tensor:
    return hidden


def _gather_equal(hidden: Tensor) -> Tensor:
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
