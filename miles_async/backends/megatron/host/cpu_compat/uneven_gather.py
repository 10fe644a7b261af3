"""Gathers along the first dimension where ranks hold different lengths: NCCL takes them, gloo refuses.

Split experts on several ranks (EP > 1 with ETP > 1) exchange as many tokens as the router sent to each rank, for which
megatron-core 0.16 calls ``all_gather`` with tensors of these lengths. Padded to the longest, they are even.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def _patch_mappings(module: types.ModuleType) -> None:
    even: Any = module._gather_along_first_dim

    def gather(input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even(input_, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        padding = (0, 0) * (input_.ndim - 1) + (0, longest - len(input_))
        parts = [input_.new_empty(longest, *input_.shape[1:]) for _ in output_split_sizes]
        dist.all_gather(parts, F.pad(input_, padding), group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    module._gather_along_first_dim = gather  # type: ignore[attr-defined]


PATCHES = {"megatron.core.tensor_parallel.mappings": _patch_mappings}
