"""Data-parallel ranks as threads, for what gathers over them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from miles_async.algorithms.whole_batch.transform import Gather

T = TypeVar("T")


def alone(values: Tensor) -> Tensor:
    """Gather where there is one rank."""
    return values


def on_ranks(count: int, work: Callable[[int, Gather], T]) -> list[T]:
    """``work(rank, gather)`` of all ranks, in their order."""
    meeting, given = threading.Barrier(count), [torch.empty(0)] * count

    def run(rank: int) -> T:
        def gather(values: Tensor) -> Tensor:
            given[rank] = values
            meeting.wait(10)
            everything = torch.cat(given)
            meeting.wait(10)
            return everything

        return work(rank, gather)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))
