"""Exported tensors → buckets of bounded size, in sending order: no processes, no network, no files.

A bucket becomes one file and one update request. Small buckets save an engine memory, large ones save
requests. A module is never split: some of SGLang's loaders join tensors of one (q_a_proj and
kv_a_proj_with_mqa of DeepSeek-V3's attention), and forget the first unless they get the second with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # only used on tensors, which bring it along
    from torch import Tensor

Bucket = dict[str, "Tensor"]


def share(tensors: Iterable[tuple[str, Tensor]], sender: int, senders: int) -> Iterator[tuple[str, Tensor]]:
    """Every ``senders``-th module, starting with number ``sender``. Takes all tensors: exporting is collective."""
    for number, module in enumerate(_modules(tensors)):
        if number % senders == sender:
            yield from module


def into_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Buckets of at most ``max_bytes`` in the order given; a larger module gets a whole bucket."""
    if max_bytes < 1:
        raise ValueError(f"buckets need at least one byte, not {max_bytes} (--update-weight-buffer-size)")
    pending: Bucket = {}
    size = 0
    for named in _modules(tensors):
        module = dict(named)
        module_size = sum(tensor.nbytes for tensor in module.values())
        if pending and size + module_size > max_bytes:
            yield pending
            pending, size = {}, 0
        pending |= module
        size += module_size
    if pending:
        yield pending


def _modules(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    for _, module in groupby(tensors, key=lambda item: item[0].rsplit(".", 2)[0]):  # "module.linear.weight"
        yield module
