"""Exported tensors → buckets of bounded size in host memory, in sending order: no processes, no network, no files.

A bucket becomes one file and one update request. Small buckets bound what an engine must hold beside its weights, large
ones save requests. A module is never split: some of SGLang's loaders join tensors of one (q_a_proj and
kv_a_proj_with_mqa of DeepSeek-V3's attention), and forget the first unless they get the second with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # only used on tensors, which bring it along
    from torch import Tensor

Bucket = dict[str, "Tensor"]

_ALIGNMENT = 64  # bytes: a cache line, and enough for every dtype


def share(tensors: Iterable[tuple[str, Tensor]], sender: int, senders: int) -> Iterator[tuple[str, Tensor]]:
    """Every ``senders``-th module, starting with number ``sender``. Takes all tensors: exporting is collective."""
    for number, module in enumerate(_modules(tensors)):
        if number % senders == sender:
            yield from module


class BucketBuffers:
    """Two buffers in host memory, each as large as a bucket: for this bucket, and for what is copied ahead of the next.

    Exported tensors are copied, since exporter and optimizer change them. Allocating memory for every tensor would cost
    time, and more memory than is used: the allocator keeps freed pieces that later tensors don't fit into.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._buffers: list[Tensor] = []  # for this bucket, and for the next one
        self._used = [0, 0]  # bytes of each

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of the same dtype and shape, valid until the second :meth:`turn` from now."""
        if not self._buffers:
            self._buffers = [_buffer(self._bucket_bytes, pinned=tensor.is_cuda) for _ in self._used]
        return self._copy(tensor, (0, 1))

    def turn(self, ahead: Bucket) -> Bucket:
        """Begin the next bucket with what was copied ``ahead``; nothing else in the buffers is needed any more."""
        done = self._buffers[0].untyped_storage().data_ptr()
        self._buffers.reverse()
        self._used = [self._used[1], 0]
        return {
            name: self._copy(tensor, (0,)) if tensor.untyped_storage().data_ptr() == done else tensor
            for name, tensor in ahead.items()
        }

    def _copy(self, tensor: Tensor, buffers: Iterable[int]) -> Tensor:
        """Copy to the first of ``buffers`` with room, or to memory of its own if there is none.

        That happens for modules that are larger than a bucket, or nearly so.
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
    """Buckets of at most ``max_bytes`` in the order given; a larger module has a bucket of its own.

    Copies tensors as they come, and holds at most one bucket and one module of them. A bucket is valid until the next
    one is asked for.
    """
    if max_bytes < 1:
        raise ValueError(f"buckets need at least one byte, not {max_bytes} (--update-weight-buffer-size)")
    buffers = BucketBuffers(max_bytes)
    pending: Bucket = {}
    size = 0
    for named in _modules(tensors):
        module = {name: buffers.copy(tensor) for name, tensor in named}
        module_size = sum(tensor.nbytes for tensor in module.values())
        if pending and size + module_size > max_bytes:
            yield pending
            pending, size = {}, 0
            module = buffers.turn(module)
        pending |= module
        size += module_size
    if pending:
        yield pending


def _buffer(size: int, *, pinned: bool) -> Tensor:
    """Pinned memory takes copies from a GPU in a fraction of the time."""
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _modules(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    for _, module in groupby(tensors, key=lambda item: item[0].rsplit(".", 2)[0]):  # "module.linear.weight"
        yield module
