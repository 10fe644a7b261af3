"""Exported tensors → buckets of bounded size, in sending order. Pure: no processes, no network, no files.

A bucket is one file and what one update request announces. Small buckets bound what an engine must hold beside its
weights, large ones save requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tensors bring all that is needed of torch along
    from torch import Tensor

Bucket = dict[str, "Tensor"]


def into_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """In the order given, each bucket of at most ``max_bytes``; a larger tensor has a bucket of its own.

    Takes tensors as they come and holds no more than one bucket of them.
    """
    if max_bytes < 1:
        raise ValueError(f"buckets need at least one byte, not {max_bytes} (--update-weight-buffer-size)")
    pending: Bucket = {}
    size = 0
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > max_bytes:
            yield pending
            pending, size = {}, 0
        pending[name] = tensor
        size += tensor.nbytes
    if pending:
        yield pending


def on_host(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Contiguous copies in host memory, which neither the exporter nor the optimizer changes."""
    for name, tensor in tensors:
        yield name, tensor.detach().contiguous().to("cpu", copy=True)
