"""In the server's process: receives the buckets that a publication's senders announce, ahead of loading.

Every rank of every engine starts to receive them in the order of their indices, so no two ranks can wait for each
other, and NCCL's operations have the same order everywhere. On GPUs each bucket is a broadcast, which NCCL brings to
each node once. On a CPU it takes the way of ``relay.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from miles_async.engines.sglang.relay import Relay
from miles_async.types import TensorMeta

MOST_RECEIVED_AHEAD = 3  # buckets, while another is loaded: one per sender, bounded for memory


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket that a sender announced."""

    index: int
    tensors: tuple[TensorMeta, ...]
    group: dist.ProcessGroup  # with its sender

    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [prod(meta.shape) * _dtype(meta).itemsize for meta in self.tensors]


class Arriving(Protocol):
    """A bucket that is being received."""

    def wait(self) -> Tensor:
        """Wait until the bucket is there; return its memory (uint8), which has at least its size."""
        ...

    def loaded(self) -> None:
        """Allow the memory to be used again."""
        ...


class Line(Protocol):
    """Brings buckets to this rank."""

    def start(self, group: dist.ProcessGroup, size: int) -> Arriving:
        """Start to receive the next bucket, of ``size`` bytes."""
        ...

    def finish(self) -> None:
        """Wait until no other rank needs anything from this one."""
        ...


def received(groups: Sequence[dist.ProcessGroup], device: torch.device) -> Generator[list[tuple[str, Tensor]]]:
    """The buckets that rank 0 of each group announces and sends, in the order of their indices.

    The tensors are views of memory that is used again for a later bucket, and that other engines may read: they must
    not be written to. Raises torch's errors of broken groups.
    """
    buckets = sorted((each for group in groups for each in _announced(group, device)), key=attrgetter("index"))
    at_once = 1 + min(len(groups), MOST_RECEIVED_AHEAD)
    if device.type == "cpu":
        largest = max((sum(bucket.sizes()) for bucket in buckets), default=0)
        yield from receive(buckets, Relay.of(groups[0], at_once, largest), at_once)
    else:
        yield from receive(buckets, Broadcasts(device), at_once)


def receive(buckets: Iterable[Bucket], line: Line, at_once: int) -> Generator[list[tuple[str, Tensor]]]:
    """The tensors of each bucket. ``at_once``: buckets that are received or loaded at the same time."""
    under_way: deque[tuple[Bucket, Arriving]] = deque()
    for bucket in buckets:
        if len(under_way) == at_once:
            yield from _taken(*under_way.popleft())
        under_way.append((bucket, line.start(bucket.group, sum(bucket.sizes()))))
    while under_way:
        yield from _taken(*under_way.popleft())
    line.finish()


def _announced(group: dist.ProcessGroup, device: torch.device) -> Iterable[Bucket]:
    """The buckets of the group's sender."""
    length = torch.empty(1, dtype=torch.int64, device=device)
    dist.broadcast(length, src=0, group=group)
    manifest = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(manifest, src=0, group=group)
    buckets = msgspec.msgpack.decode(manifest.cpu().numpy(), type=dict[int, tuple[TensorMeta, ...]])
    return [Bucket(index, tensors, group) for index, tensors in buckets.items()]


def _taken(bucket: Bucket, arriving: Arriving) -> Generator[list[tuple[str, Tensor]]]:
    """Yield the bucket's tensors once they are there."""
    sizes = bucket.sizes()
    parts = arriving.wait()[: sum(sizes)].split(sizes)
    yield [
        (meta.name, part.view(_dtype(meta)).view(meta.shape)) for meta, part in zip(bucket.tensors, parts, strict=True)
    ]
    arriving.loaded()


def _dtype(meta: TensorMeta) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return dtype


class Broadcasts:
    """Implements Line by broadcasts of rank 0 to all others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def start(self, group: dist.ProcessGroup, size: int) -> Arriving:
        memory = self._free.pop() if self._free else torch.empty(0, dtype=torch.uint8, device=self._device)
        if len(memory) < size:
            memory = memory.new_empty(size)
        return _Broadcast(memory, dist.broadcast(memory[:size], src=0, group=group, async_op=True), self._free)

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """Implements Arriving."""

    memory: Tensor
    work: dist.Work
    free: list[Tensor]

    def wait(self) -> Tensor:
        self.work.wait()
        return self.memory

    def loaded(self) -> None:
        self.free.append(self.memory)
