"""Patches of megatron-core 0.19 modules that assume CUDA tensors, NCCL, or a fast ``torch.compile``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from miles_async.backends.megatron.host import gated_delta, mamba


def _patch_random(module: Any) -> None:
    """The tracker of model-parallel generators forks the CPU's instead of the CUDA one."""
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # fork() warns when the CPU generator moves inside it; here it is the forked generator.
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage()
    )


def _patch_moe_utils(module: Any) -> None:
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """A tensor that is on the host already must still be returned as numpy."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _patch_mappings(module: Any) -> None:
    """Pad gathers along the first dimension where ranks hold different lengths: NCCL takes them, gloo refuses.

    Split experts on several ranks (EP > 1 with ETP > 1) exchange as many tokens as the router sent to each rank.
    """
    even = module._gather_along_first_dim

    def gather(input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even(input_, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        padding = (0, 0) * (input_.ndim - 1) + (0, longest - len(input_))
        parts = [input_.new_empty(longest, *input_.shape[1:]) for _ in output_split_sizes]
        dist.all_gather(parts, F.pad(input_, padding), group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    module._gather_along_first_dim = gather


def _patch_distributed_optimizer(module: Any) -> None:
    """Host types have the names of CUDA's inside its constructor, which compares ``param.type()`` with these."""
    real = torch.Tensor.type

    def type_(tensor: Tensor, *args: Any) -> Any:
        return real(tensor, *args) if args else real(tensor).replace("torch.", "torch.cuda.", 1)

    optimizer = module.DistributedOptimizer
    optimizer.__init__ = mock.patch.object(torch.Tensor, "type", type_)(optimizer.__init__)


PATCHES: dict[str, Callable[[Any], None]] = {
    # torch.compile of tiny pointwise helpers costs a C++ compiler run each, and needs a compiler.
    "megatron.core.jit": lambda module: module.disable_jit_fuser(),
    "megatron.core.optimizer.distrib_optimizer": _patch_distributed_optimizer,
    "megatron.core.ssm.gated_delta_net.common": gated_delta.patch,
    "megatron.core.ssm.mamba_context_parallel": mamba.patch_context_parallel,
    "megatron.core.ssm.mamba_mixer": mamba.patch_mixer,
    "megatron.core.tensor_parallel.mappings": _patch_mappings,
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils,
}
