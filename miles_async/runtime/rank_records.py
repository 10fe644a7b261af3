"""Exchange records between the ranks of a torch process group, as msgpack in tensors of bytes.

torch's own collectives of objects unpickle received data, so any client of a rank's port could make it run code.
ruff rejects them (``pyproject.toml``).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from miles_async.runtime.serialization import decode, encode


def gather_values(values: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the [n] of every rank, in their order; n may differ. Collective over ``group`` (None: all ranks)."""
    count = torch.tensor([len(values)], device=values.device)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, count, group=group)
    sizes = [int(each) for each in counts]
    padded = values.new_zeros(max(sizes))
    padded[: len(values)] = values
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [each[:size] for each, size in zip(received, sizes, strict=True)]


def gather_records[T](record: T, record_type: type[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the record of every rank, in the order of ranks. Collective over ``group`` (None: all ranks).

    Raises:
        TypeError: the record holds something else than plain data and arrays.
        msgspec.MsgspecError: a rank sent something else than a ``record_type``.
    """
    return [_record(content, record_type) for content in gather_values(_content(record, group), group)]


def broadcast_record[T](record: T, record_type: type[T], *, source: int, group: dist.ProcessGroup | None = None) -> T:
    """Return the record of rank ``source`` of the group on all of its ranks. Collective; raises as gather_records."""
    content = _content(record, group)
    length = torch.tensor([len(content)], device=content.device)
    dist.broadcast(length, group=group, group_src=source)
    if dist.get_rank(group) != source:
        content = content.new_empty(int(length))
    dist.broadcast(content, group=group, group_src=source)
    return _record(content, record_type)


def _content(record: object, group: dist.ProcessGroup | None) -> Tensor:
    """Encode the record into a tensor where the group's backend takes it."""
    device = "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"
    return torch.frombuffer(bytearray(encode(record)), dtype=torch.uint8).to(device)


def _record[T](content: Tensor, record_type: type[T]) -> T:
    return decode(content.cpu().numpy().tobytes(), record_type)
