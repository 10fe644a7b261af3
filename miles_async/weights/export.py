"""Exported tensors → buckets of bounded size, in sending order. Pure: no processes, no network.

A bucket is what one update request announces; within it tensors are sent one by one in order. Small buckets bound
what an engine must hold beside its weights, large ones save requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_async.types import TensorMeta

if TYPE_CHECKING:  # tensors bring all that is needed of torch along
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors and their description, in the same order."""

    metas: tuple[TensorMeta, ...]
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def into_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """In the order given, each bucket of at most ``max_bytes``; a larger tensor has a bucket of its own.

    Takes tensors as they come and holds no more than one bucket of them.
    """
    if max_bytes < 1:
        raise ValueError(f"buckets need at least one byte, not {max_bytes} (--update-weight-buffer-size)")
    names: list[str] = []
    pending: list[Tensor] = []
    size = 0
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > max_bytes:
            yield _bucket(names, pending)
            names, pending, size = [], [], 0
        names.append(name)
        pending.append(tensor)
        size += tensor.nbytes
    if pending:
        yield _bucket(names, pending)


def stage_on_host(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> list[Bucket]:
    """Buckets of copies in host memory, to be sent later, perhaps more than once."""
    return list(into_buckets(on_host(tensors), max_bytes))


def on_host(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Contiguous copies in host memory, which further optimizer steps do not change."""
    for name, tensor in tensors:
        yield name, tensor.detach().contiguous().to("cpu", copy=True)


def _bucket(names: list[str], tensors: list[Tensor]) -> Bucket:
    metas = (
        TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in zip(names, tensors, strict=True)
    )
    return Bucket(tuple(metas), tuple(tensors))
