"""Layers with a low-rank adapter: LoRA by megatron-bridge, and DoRA, whose form there (0.6) is wrong on several ranks.

LoRA computes (W + α/r · B·A) x with a frozen weight W [out, in] and trained A [r, in] and B [out, r] (Hu et al.,
arXiv:2106.09685). DoRA divides each row of that sum by its length and multiplies it by a trained one (Liu
et al., arXiv:2402.09353). Tensor-parallel ranks share A and B; every expert of a mixture has its own.

Bridge's DoRA measures a row that ranks share by each rank's part alone, does not sum the gradients of lengths over
sequence-parallel ranks, counts them on one rank only in the norm, scales biases, and has none for experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.utils import ParallelLinearAdapter
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

_LENGTHS = "row_lengths"


class Adapter(ParallelLinearAdapter):
    """A and B, as ``linear_in`` and ``linear_out``, and with DoRA the lengths of this rank's rows."""

    is_expert: bool
    row_lengths: torch.nn.Parameter | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_parameter(_LENGTHS, None)

    def add_lengths(self, lengths: Tensor) -> None:
        """Train ``lengths``, [out] or this rank's part of it."""
        parameter = torch.nn.Parameter(lengths)
        # Megatron reads these to choose parameters for the norm of gradients, and ranks to sum gradients over.
        split = self.is_expert or not self.input_is_parallel
        set_tensor_model_parallel_attributes(parameter, is_parallel=split, dim=0 if split else -1, stride=1)
        parameter.allreduce = getattr(self.linear_in.weight, "allreduce", True)  # type: ignore[attr-defined]
        parameter.sequence_parallel = not split and self.config.sequence_parallel  # type: ignore[attr-defined]
        self.row_lengths = parameter
        self._keep_in_float32_parameter_names = (_LENGTHS,)  # for megatron-bridge (0.6), when it casts the model

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        expert, self.is_expert = self.is_expert, False  # the bridge assumes an adapter shared by all experts
        try:
            sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata, **kwargs)
        finally:
            self.is_expert = expert
        if self.row_lengths is not None:
            lengths = make_sharded_tensors_for_checkpoint(
                {_LENGTHS: self.row_lengths},
                prefix,
                {} if self.input_is_parallel else {_LENGTHS: 0},
                sharded_offsets,
                tp_group=self.linear_out.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            if "linear_fc1" in self.base_linear_name:  # rows of two matrices, each split over ranks
                key = f"{prefix}{_LENGTHS}"
                lengths[key] = apply_swiglu_sharded_factory(lengths[key], sharded_offsets)
            sharded |= lengths
        return sharded


class DoRALinear(AdapterWrapper):
    """A layer whose weight has the row directions of W + α/r · B·A, and trained row lengths."""

    def __init__(self, to_wrap: torch.nn.Module, adapter: Adapter) -> None:
        super().__init__(to_wrap, adapter)
        adapter.add_lengths(_lengths(summed_weight(self), adapter))  # in fp32, whatever the weight's dtype

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias, layer_input = self.base_linear_forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return output, bias
        added = self.adapter(layer_input.contiguous()).reshape(output.shape)
        scales = self.row_scales(summed_weight(self)).to(output.dtype)
        inside = None if bias is not None or getattr(self.to_wrap, "skip_bias_add", False) else self.to_wrap.bias
        if inside is None or not inside.numel():
            return scales * (output + added), bias
        return scales * (output - inside + added) + inside, None

    def row_scales(self, weight: Tensor) -> Tensor:
        """Return the factor of each row of the summed ``weight``. The row's present length gets no gradient, as in
        section 4.3 of the paper. Collective like :func:`summed_weight`.
        """
        return self.adapter.row_lengths / _lengths(weight, self.adapter)


@torch.no_grad()
def summed_weight(wrapper: AdapterWrapper) -> Tensor:
    """This rank's part of W + α/r · B·A, in fp32 at least. Collective over the ranks that share the layer."""
    adapter, weight = wrapper.adapter, wrapper.to_wrap.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    first, second = adapter.linear_in.weight.to(dtype), adapter.linear_out.weight.to(dtype)
    if adapter.input_is_parallel:  # each rank has columns of W and A, and rows of B; all rows are needed
        second = of_all_ranks(second, adapter)
    else:
        first = of_all_ranks(first, adapter)
    return weight.to(dtype) + adapter.alpha / adapter.dim * second @ first


@torch.no_grad()
def merged_weight(wrapper: AdapterWrapper) -> Tensor:
    """This rank's part of the weight that computes what the wrapped layer does, rounded once. Collective likewise."""
    weight = summed_weight(wrapper)
    if isinstance(wrapper, DoRALinear):
        weight = wrapper.row_scales(weight)[:, None] * weight
    return weight.to(wrapper.to_wrap.weight.dtype)


@torch.no_grad()
def _lengths(weight: Tensor, adapter: Adapter) -> Tensor:
    """L2 norms of whole rows; ``weight`` is this rank's part of them."""
    squares = weight.square().sum(1)
    group = adapter.linear_in.tp_group
    if adapter.input_is_parallel and group.size() > 1:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def of_all_ranks(part: Tensor, adapter: Adapter, dim: int = 0) -> Tensor:
    """Rows (columns for ``dim`` 1) of all ranks that share the layer, in their order. Collective over them."""
    group = adapter.linear_in.tp_group
    if group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)
