"""Exported tensors → buckets of bounded size in host memory, in sending order: no processes, no network, no files.

A bucket is one file and what one update request announces. Small buckets bound what an engine must hold beside its
weights, large ones save requests. A module is never split: some of SGLang's loaders join tensors of one (q_a_proj and
kv_a_proj_with_mqa of DeepSeek-V3's attention), and forget the first where they are not given the second with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tensors bring all that is needed of torch along
    from torch import Tensor

Bucket = dict[str, "Tensor"]

_ALIGNMENT = 64  # bytes; of every dtype, and of a cache line


def share(tensors: Iterable[tuple[str, Tensor]], sender: int, senders: int) -> Iterator[tuple[str, Tensor]]:
    """Every ``senders``-th module, from the ``sender``-th on. Takes all tensors, since exporting is collective."""
    for number, module in enumerate(_modules(tensors)):
        if number % senders == sender:
            yield from module


class HostCopies:
    """Copies of exported tensors in host memory, which neither the exporter nor the optimizer changes.

    They go to one of two buffers, each as large as a bucket, and where that is full to the other one. Taking memory
    anew for every tensor would cost time, and more of it than is used: the allocator keeps freed pieces that what comes
    next does not fit into.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._buffers: list[Tensor] = []  # of this bucket, and of the next one
        self._used = [0, 0]  # bytes of them

    def copy(self, tensor: Tensor) -> Tensor:
        """Contiguous, of the same dtype and shape; good until the second :meth:`turn` from now."""
        if not self._buffers:
            self._buffers = [_buffer(self._bucket_bytes, pinned=tensor.is_cuda) for _ in self._used]
        return self._copy(tensor, (0, 1))

    def turn(self, ahead: Bucket) -> Bucket:
        """The next bucket begins, with what was copied ``ahead``; nothing else of this one is needed any more."""
        done = self._buffers[0].untyped_storage().data_ptr()
        self._buffers.reverse()
        self._used = [self._used[1], 0]
        return {
            name: self._copy(tensor, (0,)) if tensor.untyped_storage().data_ptr() == done else tensor
            for name, tensor in ahead.items()
        }

    def _copy(self, tensor: Tensor, buffers: Iterable[int]) -> Tensor:
        """To the first of ``buffers`` with room; to memory of its own if there is none: of modules larger than a
        bucket, or nearly so.
        """
        for index in buffers:
            start = _ALIGNMENT * -(-self._used[index] // _ALIGNMENT)
            end = start + tensor.nbytes
            if end <= self._bucket_bytes:
                self._used[index] = end
                place = self._buffers[index][start:end].view(tensor.dtype).view(tensor.shape)
                return place.copy_(tensor.detach())
        return tensor.detach().contiguous().to("cpu", copy=True)


def into_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """In the order given, each bucket of at most ``max_bytes``; a larger module has a bucket of its own.

    Copies tensors as they come and holds no more than one bucket and one module of them. A bucket is good until the
    next one is asked for.
    """
    if max_bytes < 1:
        raise ValueError(f"buckets need at least one byte, not {max_bytes} (--update-weight-buffer-size)")
    host = HostCopies(max_bytes)
    pending: Bucket = {}
    size = 0
    for named in _modules(tensors):
        module = {name: host.copy(tensor) for name, tensor in named}
        module_size = sum(tensor.nbytes for tensor in module.values())
        if pending and size + module_size > max_bytes:
            yield pending
            pending, size = {}, 0
            module = host.turn(module)
        pending |= module
        size += module_size
    if pending:
        yield pending


def _buffer(size: int, *, pinned: bool) -> Tensor:
    """Pinned: copies from a GPU take a fraction of the time."""
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _modules(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    for _, module in groupby(tensors, key=lambda item: item[0].rsplit(".", 2)[0]):  # "module.linear.weight"
        yield module
