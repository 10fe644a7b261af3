"""Copies of tensors in one piece of host memory, which a GPU writes directly."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size


class HostBuffer:
    """Host memory for complete copies of tensors, reused by the next ones; pinned if they come from a GPU."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None  # bytes

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy ``tensors``; the copies are valid until the next call."""
        starts = [0]
        for tensor in tensors:
            starts.append(-(-(starts[-1] + tensor.nbytes) // ALIGNMENT) * ALIGNMENT)
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if self._memory is None or self._memory.nbytes < starts[-1]:
            self._memory = None  # freed before there is another
            self._memory = _host_memory(starts[-1], pinned=on_gpu)
        memory = self._memory.numpy()
        copies = [_place(memory, start, tensor) for start, tensor in zip(starts, tensors, strict=False)]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies


def _place(memory: np.ndarray, start: int, tensor: Tensor) -> Tensor:
    """A tensor like ``tensor`` at ``start``, with a separate storage, since torch saves whole storages."""
    if tensor.numel() == 0:
        return torch.empty_like(tensor, device="cpu")
    return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)


def _host_memory(size: int, *, pinned: bool) -> Tensor:
    memory = torch.empty(size, dtype=torch.uint8)
    if pinned:  # in place: torch's allocator of pinned memory would take the next power of two
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        weakref.finalize(memory, torch.cuda.cudart().cudaHostUnregister, memory.data_ptr())
    return memory
